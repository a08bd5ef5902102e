// SPDX-License-Identifier: Apache-2.0
// The tensors of attention, decode and MLA in an open file. The ranks of a process share them, so the short lists are
// in memory once.
#pragma once

#include <memory>
#include <optional>

#include "ops/attention_jobs/compressed_tensors.hpp"
#include "ops/common/input_tensors.hpp"
#include "ops/common/tensor_file.hpp"
#include "ops/mla/mla_tensors.hpp"

namespace ringattn {

struct InputFile {
  // Finds q, k and v, or q and a paged cache, or q and latents, and optional tensors. Throws kFile.
  explicit InputFile(std::shared_ptr<const TensorFile> opened_file);

  const SafetensorsFile& file() const { return opened->file; }
  const FileInput& request() const { return opened->request; }

  std::shared_ptr<const TensorFile> opened;
  std::optional<CompressedTensors> compressed;  // only if keys or values are compressed
  std::optional<MlaTensors> latents;            // only for MLA
  InputTensors tensors;                         // found last
};

// Opens the file, or returns the one that a rank with the same share has opened. Throws kFile.
std::shared_ptr<const InputFile> open_input_file(const FileInput& input, JobShare& share);

}  // namespace ringattn
