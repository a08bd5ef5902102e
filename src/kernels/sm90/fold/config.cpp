// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/fold/config.hpp"

#include <fmt/format.h>

#include <span>

#include "kernels/cuda/config_table.hpp"

namespace ringattn::sm90 {

std::optional<FoldConfig> choose_config(const FoldSpec& spec) {
  return cuda::find_config(std::span<const FoldConfig>(kFoldConfigs), spec);
}

std::vector<std::string> fold_missing(const FoldSpec& spec) {
  std::vector<std::string> missing = cuda::missing_in_table(std::span<const FoldConfig>(kFoldConfigs), spec);
  const auto config = choose_config(spec);
  const std::string lists = config ? missing_for_lists(spec.lists, {kQueryTile, config->key_tile}) : std::string();
  if (!lists.empty()) missing.push_back(lists);
  return missing;
}

std::string describe(const FoldConfig& config) {
  return fmt::format("tile {}x{}x{}{}{}, {} stages of keys, {:.1f} KiB, {} registers", config.warpgroups, kQueryTile,
                     config.key_tile, config.overlaps ? " overlapped" : "",
                     config.walk_ctas > 1 ? fmt::format(", {} CTAs side by side", config.walk_ctas) : "", config.stages,
                     static_cast<double>(config.tile_bytes()) / 1024.0, config.fold_registers());
}

std::vector<std::string> fold_configs() { return cuda::config_lines(std::span<const FoldConfig>(kFoldConfigs)); }

std::string device_obstacle(int reserved_bytes, int multiprocessors) {
  if (reserved_bytes != kReservedBytes) {
    return fmt::format("its driver reserves {} bytes of a CTA's shared memory, not {}", reserved_bytes, kReservedBytes);
  }
  if (multiprocessors > kMostCtas) {
    return fmt::format("it has {} multiprocessors, and the kernel counts with {} at most", multiprocessors, kMostCtas);
  }
  return {};
}

}  // namespace ringattn::sm90
