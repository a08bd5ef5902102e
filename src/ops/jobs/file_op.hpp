// SPDX-License-Identifier: Apache-2.0
// Ops whose result is a file like their input, such as a compressed KV cache. One process runs them, without ranks.
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
  bool replace = false;    // an output file that exists
  bool compare = false;    // rows of a result computed from both files
  std::int64_t rows = 64;  // of these
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
  // Reads, computes and writes; the output appears whole or not at all. Throws what check() throws, kFile, kMemory and
  // kUnsupported.
  FileOpResult (*run)(const FileOpRequest& request);
  bool synthetic = true;  // its input may be synthetic
  // Throws kFile where the output can't be written; null: it is a file.
  void (*check_output)(const std::string& path, bool replace) = nullptr;
  std::string_view output_example = "small.safetensors";
};

}  // namespace ringattn
