// SPDX-License-Identifier: Apache-2.0
// How sm90_attention computes a AttentionSpec: tiles, warpgroups and shared memory. A pure function of the description,
// so that ranks agree on it; launching is elsewhere (attention.hpp).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/cuda/config_table.hpp"
#include "kernels/cuda/device/panels.hpp"

namespace ringattn::sm90 {

using cuda::kPanelColumns;
using cuda::kPanelRowBytes;

inline constexpr int kQueryTile = 64;  // rows of a warpgroup's products

// References are powers of two: times this, a difference of theirs is its logarithm to base 2; times kLn2 they are
// natural logarithms.
inline constexpr float kOffsetLog2Factor = 1.0F;
inline constexpr float kLn2 = 0.693147182F;

struct AttentionConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  int key_tile = 0;    // keys of a tile
  int warpgroups = 0;  // that attention, each its own query tile; one more fetches
  int stages = 0;      // K and V tiles in shared memory
  int q_stages = 2;    // of query tiles in shared memory: the next ones come while these are folded
  // Whether a warpgroup's softmax runs beside its own P V of the tile before, not only beside the others' products.
  bool overlaps = false;
  int cluster_ctas =
      1;  // CTAs that kv_loop over their keys side by side where that pays: each fetches its share for all

  // Where tiles overlap and stages are few, K of a stage goes back, and its next one comes, ahead of V.
  constexpr bool keys_ahead() const { return overlaps && stages == 2; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  // Registers of a thread: 65,536 of a multiprocessor, shared out in eights.
  constexpr int producer_registers() const { return warpgroups == 3 ? 32 : 40; }
  constexpr int consumer_registers() const { return warpgroups == 3 ? 160 : 232; }
  // What a warpgroup keeps of its rows' closed groups while a task has no state: B.
  constexpr int scratch_floats() const { return kQueryTile * head_dim_v; }
  // Where it doesn't.
  constexpr AttentionConfig alone() const {
    AttentionConfig config = *this;
    config.cluster_ctas = 1;
    return config;
  }
  // Of a copy: all columns where they fill panels, else a panel.
  static constexpr int box_columns(int dim) { return dim % kPanelColumns == 0 ? dim : kPanelColumns; }
  // Of a copy of K or V: a CTA's share of the rows lies in each panel by itself.
  constexpr int key_box_rows() const { return key_tile / cluster_ctas; }
  constexpr int key_box_columns(int dim) const { return cluster_ctas == 1 ? box_columns(dim) : kPanelColumns; }
  constexpr int q_bytes() const { return kQueryTile * cuda::padded_row_bytes(head_dim); }  // of one query tile
  constexpr int k_bytes() const { return key_tile * cuda::padded_row_bytes(head_dim); }
  constexpr int v_bytes() const { return key_tile * cuda::padded_row_bytes(head_dim_v); }
  constexpr int tile_bytes() const { return q_stages * warpgroups * q_bytes() + stages * (k_bytes() + v_bytes()); }
};

// The rows of the table below that kernels are compiled for. Chosen by speed on an H200
// (bench/notes/attention-experiments.md).
inline constexpr AttentionConfig kAttentionConfigs[] = {
    {64, 64, /*key_tile=*/128, /*warpgroups=*/3, /*stages=*/4, /*q_stages=*/2, /*overlaps=*/true},
    {96, 96, 128, 3, 2},
    {128, 128, 128, 3, 2, 2, false, /*cluster_ctas=*/2},
    {192, 128, 112, 3, 2, 1},
    {256, 256, 80, 2, 2, 1, true, 2},
};

// The one that is compiled for these head dims.
consteval AttentionConfig config_for(int head_dim, int head_dim_v) {
  return cuda::config_of_dims(kAttentionConfigs, head_dim, head_dim_v);
}

// The configuration for a spec; none: the kernel can't do it, and attention_missing() says why.
std::optional<AttentionConfig> choose_config(const AttentionSpec& spec);
// See KernelRow::missing.
std::vector<std::string> attention_missing(const AttentionSpec& spec);

// One line, e.g. "tile 3x64x112, 2 stages of keys, 212.0 KiB, 160 registers".
std::string describe(const AttentionConfig& config);
// All of them, with the head dims in front. See KernelRow::configs.
std::vector<std::string> attention_configs();

// What the kernel takes for granted of a device: how much of a CTA's shared memory the device keeps for itself, and how
// many CTAs, one a multiprocessor, there are at most (pace.cuh looks at each of them).
inline constexpr int kReservedBytes = 1024;
inline constexpr int kMaxCtas = 160;

// Why the kernel can't run on a device that keeps so much shared memory of a CTA and has so many multiprocessors;
// empty: it can.
std::string device_obstacle(int reserved_bytes, int multiprocessors);

}  // namespace ringattn::sm90
