// SPDX-License-Identifier: Apache-2.0
// The file that a job's tensors are read from. Whoever starts a job opens it once (job_share.hpp); each op finds its
// own tensors in it.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "io/safetensors_file.hpp"
#include "io/safetensors_rows.hpp"
#include "io/tensor_roles.hpp"
#include "ops/common/job_share.hpp"

namespace ringattn {

// A safetensors file or its index, and what a user says of its tensors.
struct FileInput {
  std::string path;
  InputNames names = {};
  std::optional<AxisOrder> order = {};       // of q, k, v and out, x and y; absent: by the number of axes
  std::optional<AxisOrder> page_order = {};  // of a cache's pages, kThd or kHtd; absent: see find_cache()
  // latent_dim of latents in pages, where no matrix in the file gives it; 0: unknown.
  int latent_dim = 0;

  bool operator==(const FileInput&) const = default;
};

struct TensorFile {
  // Reads the header. Throws kFile.
  explicit TensorFile(const FileInput& input) : request(input), file(input.path) {}

  FileInput request;
  SafetensorsFile file;
};

// Opened now, or before by a rank with the same share, if the path leads to the same file in the same state. Throws
// kFile.
std::shared_ptr<const TensorFile> open_tensor_file(const FileInput& input, JobShare& share);

// Throws kUsage where the order of a page's axes is given for tensors without pages.
void refuse_page_order(const SafetensorsFile& file, const FileInput& input);

}  // namespace ringattn
