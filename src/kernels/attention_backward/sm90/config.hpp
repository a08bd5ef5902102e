// SPDX-License-Identifier: Apache-2.0
// Tile sizes, pipeline stages and registers of sm90_attention_backward for the head dims that it is compiled for.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/common/cuda/config_table.hpp"
#include "kernels/common/cuda/panels.hpp"

namespace ringattn::sm90 {

// Tiles of Q, with their row stats, and of dO in shared memory.
struct QueryStages {
  int q = 0, dout = 0;
};

struct BackwardConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  int dq_key_tile = 0;  // keys of a tile of the dQ kernel
  int dq_k_stages = 0;  // K tiles in shared memory; K is read by S and, later, by dQ
  int dq_v_stages = 0;
  // The kernel of dK and dV, or those of dK and of dV.
  QueryStages dkv_stages{};
  QueryStages dk_stages{}, dv_stages{};
  int ds_stages = 0;  // tiles of K and dS, for dQ from dS; 0: dS isn't stored, which gains nothing at head_dim 64

  constexpr bool has_dkv() const { return dkv_stages.q > 0; }
  constexpr bool spills() const { return ds_stages > 0; }

  // Columns of a TMA box: all columns if they fill panels of 64, else one panel.
  static constexpr int box_columns(int dim) { return dim % cuda::kPanelColumns == 0 ? dim : cuda::kPanelColumns; }
};

// Consumer warpgroups of a CTA, each with kBackwardTile rows of the gradient.
inline constexpr int kBackwardConsumers = 2;
inline constexpr int kBackwardThreads = 128 * (kBackwardConsumers + 1);
// Consumer warpgroups of a CTA of dQ from dS.
inline constexpr int kDsConsumers = 4;
inline constexpr int kDsThreads = 128 * (kDsConsumers + 1);
// setmaxnreg: registers of a thread of the producer warpgroup and of the consumers, in all kernels.
inline constexpr int kDqProducerRegisters = 40, kDqConsumerRegisters = 232;
inline constexpr int kDkvProducerRegisters = 24, kDkvConsumerRegisters = 240;
inline constexpr int kDsProducerRegisters = 32, kDsConsumerRegisters = 112;

inline constexpr BackwardConfig kBackwardConfigs[] = {
    {64, 64, /*dq_key_tile=*/128, /*dq_k_stages=*/4, /*dq_v_stages=*/4, /*dkv_stages=*/{6, 6}},
    {96, 96, 128, 3, 2, {4, 4}, {}, {}, /*ds_stages=*/4},
    {128, 128, 128, 3, 2, {4, 4}, {}, {}, 4},
    {192, 128, 64, 4, 3, {3, 3}},
    {256, 256, 64, 2, 1, {}, /*dk_stages=*/{2, 1}, /*dv_stages=*/{2, 3}},
};

// The configuration compiled for these head dims.
consteval BackwardConfig backward_config_for(int head_dim, int head_dim_v) {
  return cuda::config_of_dims(kBackwardConfigs, head_dim, head_dim_v);
}

// nullopt: the spec is unsupported, and attention_backward_missing() says why.
std::optional<BackwardConfig> choose_config(const AttentionBackwardSpec& spec);
// See KernelRow::missing.
std::vector<std::string> attention_backward_missing(const AttentionBackwardSpec& spec);

// One line, e.g. "dQ: tile 2x64x128, 3 stages of K, 2 of V; dK, dV: tile 2x64x64, 4 stages of Q, 4 of dO".
std::string describe(const BackwardConfig& config);
// See KernelRow::configs.
std::vector<std::string> attention_backward_configs();

}  // namespace ringattn::sm90
