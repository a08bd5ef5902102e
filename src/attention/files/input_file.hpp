// SPDX-License-Identifier: Apache-2.0
// A file with the tensors of a job, open. The ranks of a process share one: whatever its header and its lists take, it
// is there once.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "attention/files/input_tensors.hpp"
#include "attention/files/safetensors_file.hpp"

namespace ringattn {

// q, k and v, and what may stand beside them, in a safetensors file or its index.
struct FileInput {
  std::string path;
  InputNames names = {};
  std::optional<AxisOrder> order = {};  // absent: by the number of axes

  bool operator==(const FileInput&) const = default;
};

struct InputFile {
  explicit InputFile(const FileInput& input)
      : request(input), file(input.path), tensors(find_input(file, input.names, input.order)) {}

  FileInput request;
  SafetensorsFile file;
  InputTensors tensors;
};

// Opened now, or by another rank of this process that still holds it, if the path leads to the same file in the same
// state. Ranks open one after the other, so a file that is refused is in memory once, too. Throws kFile.
std::shared_ptr<const InputFile> open_input_file(const FileInput& input);

}  // namespace ringattn
