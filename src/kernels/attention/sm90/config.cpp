// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/sm90/config.hpp"

#include <fmt/format.h>

#include <span>

#include "kernels/common/cuda/config_table.hpp"

namespace ringattn::sm90 {

std::optional<AttentionConfig> choose_config(const AttentionSpec& spec) {
  return cuda::find_config(std::span<const AttentionConfig>(kAttentionConfigs), spec);
}

std::vector<std::string> attention_missing(const AttentionSpec& spec) {
  std::vector<std::string> missing = cuda::missing_in_table(std::span<const AttentionConfig>(kAttentionConfigs), spec);
  const auto config = choose_config(spec);
  const std::string block_mask =
      config ? missing_for_block_mask(spec.block_mask, {kQueryTile, config->key_tile}) : std::string();
  if (!block_mask.empty()) missing.push_back(block_mask);
  return missing;
}

std::string describe(const AttentionConfig& config) {
  return fmt::format("tile {}x{}x{}{}{}, {} stages of keys, {:.1f} KiB, {} registers", config.warpgroups, kQueryTile,
                     config.key_tile, config.overlaps ? " overlapped" : "",
                     config.cluster_ctas > 1 ? fmt::format(", cluster of {} CTAs", config.cluster_ctas) : "",
                     config.stages, static_cast<double>(config.tile_bytes()) / 1024.0, config.consumer_registers());
}

std::vector<std::string> attention_configs() {
  return cuda::config_lines(std::span<const AttentionConfig>(kAttentionConfigs));
}

std::string device_obstacle(int reserved_bytes, int multiprocessors) {
  if (reserved_bytes != kReservedBytes) {
    return fmt::format("its driver reserves {} bytes of a CTA's shared memory, not {}", reserved_bytes, kReservedBytes);
  }
  if (multiprocessors > kMaxCtas) {
    return fmt::format("it has {} multiprocessors, and the kernel supports at most {}", multiprocessors, kMaxCtas);
  }
  return {};
}

}  // namespace ringattn::sm90
