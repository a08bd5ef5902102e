// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/sm90/config.hpp"

#include <fmt/format.h>

#include <span>

namespace ringattn::sm90 {

std::optional<BackwardConfig> choose_config(const AttentionBackwardSpec& spec) {
  return cuda::find_config(std::span<const BackwardConfig>(kBackwardConfigs), spec.forward);
}

std::vector<std::string> attention_backward_missing(const AttentionBackwardSpec& spec) {
  std::vector<std::string> missing = missing_in_backward(spec);
  for (std::string& text : cuda::missing_in_table(std::span<const BackwardConfig>(kBackwardConfigs), spec.forward)) {
    missing.push_back(std::move(text));
  }
  return missing;
}

std::string describe(const BackwardConfig& config) {
  const auto stages = [](const QueryStages& of) { return fmt::format("{} stages of Q, {} of dO", of.q, of.dout); };
  return fmt::format(
      "dQ: tile {}x{}x{}, {} stages of K, {} of V; dK, dV: tile {}x{}x{}, {}", kBackwardConsumers, kBackwardTile,
      config.dq_key_tile, config.dq_k_stages, config.dq_v_stages, kBackwardConsumers, kBackwardTile, kBackwardTile,
      config.has_dkv() ? stages(config.dkv_stages)
                       : fmt::format("a kernel each, {}; {}", stages(config.dk_stages), stages(config.dv_stages)));
}

std::vector<std::string> attention_backward_configs() {
  return cuda::config_lines(std::span<const BackwardConfig>(kBackwardConfigs));
}

}  // namespace ringattn::sm90
