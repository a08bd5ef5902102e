// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/sm80/config.hpp"

#include <fmt/format.h>

#include <span>

#include "kernels/common/cuda/config_table.hpp"

namespace ringattn::sm80 {

std::optional<AttentionConfig> choose_config(const AttentionSpec& spec) {
  return cuda::find_config(std::span<const AttentionConfig>(kAttentionConfigs), spec);
}

std::vector<std::string> attention_missing(const AttentionSpec& spec) {
  const auto config = choose_config(spec);
  AttentionSpec asked = spec;
  if (!config || config->supports_positions()) asked.positions = 0;
  std::vector<std::string> missing = cuda::missing_in_table(std::span<const AttentionConfig>(kAttentionConfigs), asked);
  const std::string block_mask =
      config ? missing_for_block_mask(spec.block_mask, {config->query_tile(), config->key_tile}) : std::string();
  if (!block_mask.empty()) missing.push_back(block_mask);
  return missing;
}

std::string describe(const AttentionConfig& config) {
  const double kibibytes = static_cast<double>(config.shared_bytes()) / 1024.0;
  if (config.slices > 1) {
    return fmt::format("tile {}x{}, {} warps of {} columns, {} strips of keys, {:.1f} KiB", config.query_tile(),
                       config.key_tile, config.warps, config.head_dim_v / config.slices, config.stages, kibibytes);
  }
  return fmt::format("tile {}x{}, {} warps of {} rows, {} stage{} of keys, {:.1f} KiB", config.query_tile(),
                     config.key_tile, config.warps, config.rows_of_warp, config.stages, config.stages == 1 ? "" : "s",
                     kibibytes);
}

std::vector<std::string> attention_configs() {
  return cuda::config_lines(std::span<const AttentionConfig>(kAttentionConfigs));
}

}  // namespace ringattn::sm80
