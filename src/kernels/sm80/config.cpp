// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/config.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace ringattn::sm80 {

std::optional<FoldConfig> choose_config(const FoldSpec& spec) {
  if (spec.dtype == Dtype::kF32) return std::nullopt;
  const auto found = std::find_if(std::begin(kFoldConfigs), std::end(kFoldConfigs), [&](const FoldConfig& config) {
    return config.head_dim == spec.head_dim && config.head_dim_v == spec.head_dim_v;
  });
  if (found == std::end(kFoldConfigs)) return std::nullopt;
  return *found;
}

std::vector<std::string> fold_missing(const FoldSpec& spec) {
  std::vector<std::string> missing;
  if (spec.dtype == Dtype::kF32) missing.push_back("fp32 (supported: bf16, fp16)");
  const bool known = std::any_of(std::begin(kFoldConfigs), std::end(kFoldConfigs), [&](const FoldConfig& config) {
    return config.head_dim == spec.head_dim && config.head_dim_v == spec.head_dim_v;
  });
  if (!known) {
    missing.push_back(
        spec.head_dim == spec.head_dim_v
            ? fmt::format("head_dim {} (supported: 64, 96, 128, 256)", spec.head_dim)
            : fmt::format("head_dim {} with head_dim_v {} (supported: 192 with 128)", spec.head_dim, spec.head_dim_v));
  }
  return missing;
}

std::string describe(const FoldConfig& config) {
  return fmt::format("tile {}x{}, {} warps of {} rows, {} stage{} of keys, {:.1f} KiB", config.query_tile(),
                     config.key_tile, config.warps, config.rows_of_warp, config.stages, config.stages == 1 ? "" : "s",
                     static_cast<double>(config.shared_bytes()) / 1024.0);
}

std::vector<std::string> fold_configs() {
  std::vector<std::string> lines;
  for (const FoldConfig& config : kFoldConfigs) {
    const std::string dims = config.head_dim == config.head_dim_v
                                 ? fmt::format("{}", config.head_dim)
                                 : fmt::format("{}/{}", config.head_dim, config.head_dim_v);
    lines.push_back(fmt::format("head_dim {}: {}", dims, describe(config)));
  }
  return lines;
}

}  // namespace ringattn::sm80
