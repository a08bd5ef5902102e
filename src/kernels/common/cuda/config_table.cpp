// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/cuda/config_table.hpp"

#include <fmt/format.h>

namespace ringattn::cuda {

std::vector<std::string> missing_in_table(const AttentionSpec& spec, std::span<const TableDims> table) {
  std::vector<std::string> missing;
  if (spec.dtype == Dtype::kF32) missing.push_back("fp32 (supported: bf16, fp16)");
  if (spec.positions > 0) missing.push_back(missing_for_positions());
  const bool equal = spec.head_dim == spec.head_dim_v;
  std::string alike, all;  // dims that are equal or different as the spec's are; all dims
  for (const TableDims& dims : table) {
    if (dims.head_dim == spec.head_dim && dims.head_dim_v == spec.head_dim_v) return missing;
    const bool same = dims.head_dim == dims.head_dim_v;
    const std::string text =
        same ? fmt::format("{}", dims.head_dim) : fmt::format("{} with {}", dims.head_dim, dims.head_dim_v);
    all += (all.empty() ? "" : ", ") + text;
    if (equal == same) alike += (alike.empty() ? "" : ", ") + text;
  }
  const std::string& supported = alike.empty() ? all : alike;
  missing.push_back(
      equal ? fmt::format("head_dim {} (supported: {})", spec.head_dim, supported)
            : fmt::format("head_dim {} with head_dim_v {} (supported: {})", spec.head_dim, spec.head_dim_v, supported));
  return missing;
}

std::string config_line(int head_dim, int head_dim_v, const std::string& description) {
  const std::string dims =
      head_dim == head_dim_v ? fmt::format("{}", head_dim) : fmt::format("{}/{}", head_dim, head_dim_v);
  return fmt::format("head_dim {}: {}", dims, description);
}

}  // namespace ringattn::cuda
