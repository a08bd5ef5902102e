// SPDX-License-Identifier: Apache-2.0
// Ops that write a file like their input, such as a compressed KV cache. One process runs them, without ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "io/input_names.hpp"
#include "ops/common/op_plan.hpp"
#include "ops/jobs/op_entry.hpp"

namespace ringattn {

class JsonWriter;

struct FileOpRequest {
  const Settings& settings;
  const SettingSources& sources;
  std::string output;
  bool replace = false;    // an existing output file may be replaced
  bool compare = false;    // compare rows of a result computed from both files
  std::int64_t rows = 64;  // number of compared rows
  int threads = 1;
};

struct FileOpTable {
  std::vector<Cell> columns;  // without text
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> notes;  // below it
};

struct FileOpResult {
  UnreadTensors unread;            // of the input
  std::vector<std::string> lines;  // what was done
  std::vector<FileOpTable> tables;
  std::function<void(JsonWriter&)> write;  // members of a report
};

struct FileOpEntry {
  std::string_view name;  // "compress"
  // Throws kUsage for settings that contradict each other, before it reads anything.
  void (*check)(const FileOpRequest& request);
  // Reads, computes and writes. The output appears complete or not at all. Throws the errors of check(), kFile, kMemory
  // and kUnsupported.
  FileOpResult (*run)(const FileOpRequest& request);
  bool synthetic = true;  // the input may be synthetic
  // Throws kFile if the output can't be written. Null: the output is a safetensors file.
  void (*check_output)(const std::string& path, bool replace) = nullptr;
  std::string_view output_example = "small.safetensors";
};

}  // namespace ringattn
