// SPDX-License-Identifier: Apache-2.0
// A file with the tensors of a job, open. The ranks of a process share one: whatever its header and its lists take, it
// is there once.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "io/safetensors_file.hpp"
#include "ops/common/compressed_tensors.hpp"
#include "ops/common/input_tensors.hpp"
#include "ops/common/job_share.hpp"
#include "ops/mla/mla_tensors.hpp"
#include "ops/ssm/ssm_tensors.hpp"

namespace ringattn {

// The tensors of a job in a safetensors file or its index: q, k and v, or q and a paged cache, or q and latents, or
// those of an SSM layer, and what may stand beside them.
struct FileInput {
  std::string path;
  InputNames names = {};
  std::optional<AxisOrder> order = {};       // of q, k, v and out, x and y; absent: by the number of axes
  std::optional<AxisOrder> page_order = {};  // of a cache's pages, kThd or kHtd; absent: see find_cache()
  // latent_dim of latents in pages, where no matrix in the file gives it; 0: unknown.
  int latent_dim = 0;

  bool operator==(const FileInput&) const = default;
};

struct InputFile {
  // Throws kFile.
  explicit InputFile(const FileInput& input);

  FileInput request;
  SafetensorsFile file;
  std::optional<CompressedTensors> compressed;  // of compressed keys or values
  std::optional<MlaTensors> latents;            // of latent attention
  std::optional<SsmTensors> ssm;                // of an SSM layer, which has no others
  InputTensors tensors;                         // of all other ops, found last
};

// Opened now, or before by a rank with the same share, if the path leads to the same file in the same state. Throws
// kFile.
std::shared_ptr<const InputFile> open_input_file(const FileInput& input, JobShare& share);

}  // namespace ringattn
