// SPDX-License-Identifier: Apache-2.0
#include "launch/outputs.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "base/error.hpp"
#include "base/text_file.hpp"
#include "io/safetensors_index.hpp"

namespace ringattn {

namespace {

struct NamedFile {
  std::string flag;
  std::string path;
  bool written;
};

// The files that an index names are read, too. If the index can't be read, its reader refuses it later.
void add_shards(const std::string& index, std::vector<NamedFile>& files) {
  if (!index.ends_with(kIndexSuffix)) return;
  std::set<std::string> shards;
  try {
    for (const auto& [tensor, file] : read_safetensors_index(index).weight_map) shards.insert(file);
  } catch (const Error&) {
    return;
  }
  const std::string folder = index.substr(0, index.rfind('/') + 1);  // npos + 1 is 0: no folder
  for (const std::string& file : shards) files.push_back({fmt::format("{} of --input", file), folder + file, false});
}

// The canonical path that a file has or would have. The path is made absolute first, because otherwise the path of a
// missing file would stay relative.
std::filesystem::path whole_path(const std::string& path, std::error_code& error) {
  const auto absolute = std::filesystem::absolute(path, error);
  return error ? absolute : std::filesystem::weakly_canonical(absolute, error);
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  if (std::filesystem::equivalent(a, b, error) && !error) return true;
  const auto first = whole_path(a, error);
  if (error) return a == b;
  const auto second = whole_path(b, error);
  return error ? a == b : first == second;
}

}  // namespace

void check_distinct_files(const JobOptions& options) {
  std::vector<NamedFile> files = {{"--output", options.output, true},
                                  {"--json", options.json, true},
                                  {"--trace", options.trace, true},
                                  {"--record", options.record, true},
                                  {"--jsonl", options.jsonl, true},
                                  {"--input", options.input, false},
                                  {"--against", options.against, false},
                                  {"--golden", options.golden, false},
                                  {"--baseline", options.baseline, false},
                                  {"--machine", options.machine, false},
                                  {"--config", options.config, false},
                                  {"--peer", options.peer, false},
                                  {"--block-mask", options.block_mask, false},
                                  {"--model-config", options.model_config, false}};
  add_shards(options.input, files);
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (!files[i].written || files[i].path.empty()) continue;
    if (files[i].path == "-") {
      if (files[i].flag == "--json" || files[i].flag == "--jsonl") continue;
      fail(ErrorCode::kUsage, fmt::format("{} is \"-\"", files[i].flag),
           "only --json and --jsonl are written to standard output", "Name a file.");
    }
    for (std::size_t j = i + 1; j < files.size(); ++j) {
      if (files[j].path.empty() || !same_file(files[i].path, files[j].path)) continue;
      fail(ErrorCode::kUsage, fmt::format("{} and {} are the same file", files[i].flag, files[j].flag),
           files[j].written ? fmt::format("both write {}", files[i].path)
                            : fmt::format("{} would be written over what is read", files[i].path),
           "Give each its own file.");
    }
  }
}

void check_outputs(const Invocation& invocation, OutputCheck check_output) {
  const JobOptions& options = invocation.config.options;
  invocation.report_file->check();
  if (!options.output.empty())
    (check_output != nullptr ? check_output : check_output_path)(options.output, options.force);
  if (!options.trace.empty()) check_new_file(options.trace, options.force, "trace");
  if (!options.jsonl.empty() && options.jsonl != "-") check_new_file(options.jsonl, options.force, "jsonl");
  if (!options.record.empty()) check_new_file(options.record, options.force, "record");
}

}  // namespace ringattn
