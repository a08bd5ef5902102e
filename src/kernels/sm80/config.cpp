// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/config.hpp"

#include <fmt/format.h>

#include <span>

#include "kernels/cuda/config_table.hpp"

namespace ringattn::sm80 {

std::optional<FoldConfig> choose_config(const FoldSpec& spec) {
  return cuda::find_config(std::span<const FoldConfig>(kFoldConfigs), spec);
}

std::vector<std::string> fold_missing(const FoldSpec& spec) {
  const auto config = choose_config(spec);
  FoldSpec asked = spec;
  if (!config || config->knows_positions()) asked.positions = 0;
  std::vector<std::string> missing = cuda::missing_in_table(std::span<const FoldConfig>(kFoldConfigs), asked);
  const std::string lists =
      config ? missing_for_lists(spec.lists, {config->query_tile(), config->key_tile}) : std::string();
  if (!lists.empty()) missing.push_back(lists);
  return missing;
}

std::string describe(const FoldConfig& config) {
  const double kibibytes = static_cast<double>(config.shared_bytes()) / 1024.0;
  if (config.slices > 1) {
    return fmt::format("tile {}x{}, {} warps of {} columns, {} strips of keys, {:.1f} KiB", config.query_tile(),
                       config.key_tile, config.warps, config.head_dim_v / config.slices, config.stages, kibibytes);
  }
  return fmt::format("tile {}x{}, {} warps of {} rows, {} stage{} of keys, {:.1f} KiB", config.query_tile(),
                     config.key_tile, config.warps, config.rows_of_warp, config.stages, config.stages == 1 ? "" : "s",
                     kibibytes);
}

std::vector<std::string> fold_configs() { return cuda::config_lines(std::span<const FoldConfig>(kFoldConfigs)); }

}  // namespace ringattn::sm80
