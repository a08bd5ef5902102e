// SPDX-License-Identifier: Apache-2.0
// The file that a job's tensors are read from. The code that starts a job opens it once (job_share.hpp), and each op
// finds its own tensors in it.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "io/safetensors_file.hpp"
#include "io/safetensors_rows.hpp"
#include "io/tensor_roles.hpp"
#include "ops/common/job_share.hpp"

namespace ringattn {

// A safetensors file or its index, and the user's settings for its tensors.
struct FileInput {
  std::string path;
  InputNames names = {};
  std::optional<AxisOrder> order = {};       // axis order of q, k, v and out, x and y; absent: by the number of axes
  std::optional<AxisOrder> page_order = {};  // axis order of a cache's pages, kThd or kHtd; absent: see find_cache()
  // latent_dim of latents in pages, if no matrix in the file determines it; 0: unknown.
  int latent_dim = 0;

  bool operator==(const FileInput&) const = default;
};

struct TensorFile {
  // Reads the header. Throws kFile.
  explicit TensorFile(const FileInput& input) : request(input), file(input.path) {}

  FileInput request;
  SafetensorsFile file;
};

// Opens the file, or returns the one that a rank with the same share has opened, if the path still refers to it and it
// is unchanged. Throws kFile.
std::shared_ptr<const TensorFile> open_tensor_file(const FileInput& input, JobShare& share);

// Throws kUsage if an order of page axes is given for tensors without pages.
void refuse_page_order(const SafetensorsFile& file, const FileInput& input);

}  // namespace ringattn
