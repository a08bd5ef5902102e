// SPDX-License-Identifier: Apache-2.0
// Tiles, pipeline stages and shared memory of sm80_attention_backward for the head dims that it is compiled for.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/common/cuda/config_table.hpp"
#include "kernels/common/cuda/panels.hpp"

namespace ringattn::sm80 {

struct BackwardConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  int row_blocks = 0;   // of 16 rows of a gradient, per warp: as many as its accumulators leave registers for
  int dq_keys = 0;      // of K and V in a pipeline stage of dQ; divides kBackwardTile
  int dkv_queries = 0;  // of Q and dO in a pipeline stage of dK and dV; divides kBackwardTile

  static constexpr int kStages = 2;
  static constexpr int kDqWarps = 4;

  constexpr int rows_of_warp() const { return 16 * row_blocks; }
  // Head tiles of a dQ CTA.
  constexpr int dq_head_tiles() const { return kDqWarps * rows_of_warp() / kBackwardTile; }
  constexpr int dq_threads() const { return 32 * kDqWarps; }
  // A dK/dV CTA has one tile of keys, and a pair of warps for each rows_of_warp() keys: one computes P and dV, the
  // other dS and dK.
  constexpr int dkv_pairs() const { return kBackwardTile / rows_of_warp(); }
  constexpr int dkv_threads() const { return 64 * dkv_pairs(); }
  // CTAs per multiprocessor, by registers. Where shared memory is scarce, fewer are resident.
  static constexpr int kDqCtas = 2;
  constexpr int dkv_ctas() const { return 256 / dkv_threads(); }

  constexpr int row_bytes() const { return cuda::padded_row_bytes(head_dim) + cuda::padded_row_bytes(head_dim_v); }
  // Q and dO, then the stages of K and V.
  constexpr int dq_bytes() const { return (dq_head_tiles() * kBackwardTile + kStages * dq_keys) * row_bytes(); }
  // Probabilities that a pair of warps exchanges: fp32.
  constexpr int exchange_bytes() const { return rows_of_warp() * dkv_queries * 4; }
  // With few rows, a warp of dK and dV has registers for its keys, and their shared memory is used again.
  constexpr bool keys_in_registers() const { return row_blocks == 1; }
  // The stages of Q and dO, the exchanged probabilities and the stages' row stats.
  constexpr int dkv_stage_bytes() const {
    return kStages * dkv_queries * (row_bytes() + static_cast<int>(kRowStats) * 4) + dkv_pairs() * exchange_bytes();
  }
  // K and V, and the stages.
  constexpr int dkv_bytes() const {
    const int keys = kBackwardTile * row_bytes();
    return keys_in_registers() ? std::max(keys, dkv_stage_bytes()) : keys + dkv_stage_bytes();
  }
};

inline constexpr BackwardConfig kBackwardConfigs[] = {
    {64, 64, /*row_blocks=*/2, /*dq_keys=*/64, /*dkv_queries=*/64},
    {96, 96, 2, 32, 32},
    {128, 128, 2, 32, 32},
    {192, 128, 1, 32, 32},
    {256, 256, 1, 16, 32},
};

// The configuration compiled for these head dims.
consteval BackwardConfig backward_config_for(int head_dim, int head_dim_v) {
  return cuda::config_of_dims(kBackwardConfigs, head_dim, head_dim_v);
}

// nullopt: the spec is unsupported, and attention_backward_missing() says why.
std::optional<BackwardConfig> choose_config(const AttentionBackwardSpec& spec);
// See KernelRow::missing.
std::vector<std::string> attention_backward_missing(const AttentionBackwardSpec& spec);

// One line, e.g. "dQ: tile 128x32, 4 warps, 96.0 KiB; dK, dV: tile 64x32, 4 warps, 72.5 KiB".
std::string describe(const BackwardConfig& config);
// See KernelRow::configs.
std::vector<std::string> attention_backward_configs();

}  // namespace ringattn::sm80
