// SPDX-License-Identifier: Apache-2.0
// Tile sizes, warpgroups and shared memory of sm90_attention for an AttentionSpec. A pure function of the spec, so that
// all ranks agree on it. attention.hpp has the launchers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/common/cuda/config_table.hpp"
#include "kernels/common/cuda/panels.hpp"

namespace ringattn::sm90 {

using cuda::kPanelColumns;
using cuda::kPanelRowBytes;

inline constexpr int kQueryTile = 64;  // rows of a warpgroup's wgmma (M)

// Softmax offsets are base-2 logarithms. A difference of offsets times kOffsetLog2Factor is a base-2 logarithm, times
// kLn2 a natural one.
inline constexpr float kOffsetLog2Factor = 1.0F;
inline constexpr float kLn2 = 0.693147182F;

struct AttentionConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  int key_tile = 0;    // keys of a tile (N)
  int warpgroups = 0;  // consumer warpgroups, one query tile each; one producer warpgroup comes on top
  int stages = 0;      // K and V tiles in shared memory
  // query tiles of each warpgroup in shared memory: the next one is loaded while this one is computed
  int q_stages = 2;
  // Intra-warpgroup overlap: a warpgroup's softmax runs during its own P V of the previous tile, and not only during
  // the other warpgroups' wgmma.
  bool overlaps = false;
  int cluster_ctas = 1;  // cluster size where a cluster pays: each CTA loads its share of the K/V rows by multicast

  // With overlap and two stages, K of a stage is released, and its next K loaded, before V.
  constexpr bool keys_ahead() const { return overlaps && stages == 2; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  // Registers of a thread (setmaxnreg): multiples of 8, at most 65,536 in a multiprocessor.
  constexpr int producer_registers() const { return warpgroups == 3 ? 32 : 40; }
  constexpr int consumer_registers() const { return warpgroups == 3 ? 160 : 232; }
  // fp32 elements of a warpgroup's acc of merged splits, in global scratch while a task has no saved state.
  constexpr int scratch_floats() const { return kQueryTile * head_dim_v; }
  // The same configuration without a cluster.
  constexpr AttentionConfig without_cluster() const {
    AttentionConfig config = *this;
    config.cluster_ctas = 1;
    return config;
  }
  // Columns of a TMA box: all columns if they fill panels of 64, else one panel.
  static constexpr int box_columns(int dim) { return dim % kPanelColumns == 0 ? dim : kPanelColumns; }
  // Box of a K or V load. In a cluster, a CTA's share of the rows is contiguous only within a panel.
  constexpr int key_box_rows() const { return key_tile / cluster_ctas; }
  constexpr int key_box_columns(int dim) const { return cluster_ctas == 1 ? box_columns(dim) : kPanelColumns; }
  constexpr int q_bytes() const { return kQueryTile * cuda::padded_row_bytes(head_dim); }  // bytes of one query tile
  constexpr int k_bytes() const { return key_tile * cuda::padded_row_bytes(head_dim); }
  constexpr int v_bytes() const { return key_tile * cuda::padded_row_bytes(head_dim_v); }
  constexpr int tile_bytes() const { return q_stages * warpgroups * q_bytes() + stages * (k_bytes() + v_bytes()); }
};

// The configurations that kernels are compiled for, chosen by speed on an H200 (bench/notes/attention-experiments.md).
inline constexpr AttentionConfig kAttentionConfigs[] = {
    {64, 64, /*key_tile=*/128, /*warpgroups=*/3, /*stages=*/4, /*q_stages=*/2, /*overlaps=*/true},
    {96, 96, 128, 3, 2},
    {128, 128, 128, 3, 2, 2, false, /*cluster_ctas=*/2},
    {192, 128, 112, 3, 2, 1},
    {256, 256, 80, 2, 2, 1, true, 2},
};

// The configuration compiled for these head dims.
consteval AttentionConfig config_for(int head_dim, int head_dim_v) {
  return cuda::config_of_dims(kAttentionConfigs, head_dim, head_dim_v);
}

// The configuration for a spec. nullopt: unsupported, and attention_missing() says why.
std::optional<AttentionConfig> choose_config(const AttentionSpec& spec);
// See KernelRow::missing.
std::vector<std::string> attention_missing(const AttentionSpec& spec);

// One line, e.g. "tile 3x64x112, 2 stages of keys, 212.0 KiB, 160 registers".
std::string describe(const AttentionConfig& config);
// All configurations, each after its head dims. See KernelRow::configs.
std::vector<std::string> attention_configs();

// Assumptions about the device: shared memory reserved in each CTA in bytes, and the maximum number of CTAs (one for
// each multiprocessor), all of which the pace warp polls.
inline constexpr int kReservedBytes = 1024;
inline constexpr int kMaxCtas = 160;

// Why the kernel can't run on a device with these attributes. Empty: it can.
std::string device_obstacle(int reserved_bytes, int multiprocessors);

}  // namespace ringattn::sm90
