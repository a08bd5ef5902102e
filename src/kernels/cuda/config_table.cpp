// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/config_table.hpp"

#include <fmt/format.h>

namespace ringattn::cuda {

std::vector<std::string> missing_in_table(const FoldSpec& spec, bool known) {
  std::vector<std::string> missing;
  if (spec.dtype == Dtype::kF32) missing.push_back("fp32 (supported: bf16, fp16)");
  if (!known) {
    missing.push_back(
        spec.head_dim == spec.head_dim_v
            ? fmt::format("head_dim {} (supported: 64, 96, 128, 256)", spec.head_dim)
            : fmt::format("head_dim {} with head_dim_v {} (supported: 192 with 128)", spec.head_dim, spec.head_dim_v));
  }
  return missing;
}

std::string config_line(int head_dim, int head_dim_v, const std::string& description) {
  const std::string dims =
      head_dim == head_dim_v ? fmt::format("{}", head_dim) : fmt::format("{}/{}", head_dim, head_dim_v);
  return fmt::format("head_dim {}: {}", dims, description);
}

}  // namespace ringattn::cuda
