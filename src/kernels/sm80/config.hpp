// SPDX-License-Identifier: Apache-2.0
// How sm80_attention computes a AttentionSpec: tiles, warps and shared memory. A pure function of the description, so
// that ranks agree on it; launching is elsewhere (attention.hpp).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/cuda/config_table.hpp"
#include "kernels/cuda/device/panels.hpp"

namespace ringattn::sm80 {

// A strip is what is fetched at a time of a key tile where O is cut into slices: so many columns of its keys, or so
// many rows of its values.
inline constexpr int kStripColumns = 128;
inline constexpr int kStripKeys = 16;

struct AttentionConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  int key_tile = 0;         // keys of a tile
  int warps = 0;            // of a CTA
  int rows_of_warp = 0;     // query rows, a multiple of 16
  int stages = 0;           // K and V tiles, or strips of them, in shared memory; 1: K and V are fetched in turn
  int ctas = 0;             // of a multiprocessor: what registers and shared memory are cut for
  int columns_at_once = 0;  // blocks of 16 columns of O that P V works on side by side
  bool seam = true;         // see TileStep::fold()
  int slices = 1;  // that O's columns are cut into, one for each warp of those that share rows (sliced/tile_step.cuh)

  constexpr int query_tile() const { return warps / slices * rows_of_warp; }
  // Whether there is a kernel for keys with positions of their own.
  constexpr bool knows_positions() const { return slices == 1; }
  constexpr int threads() const { return 32 * warps; }
  // Scratch memory of a multiprocessor: for each CTA the rows' closed groups, and whether somebody has them.
  constexpr int scratch_floats() const { return ctas * (query_tile() * (head_dim_v + 2) + 1); }
  // Shared memory of a CTA that cuts O into slices, but for where its tiles lie: Q and probabilities, stages of strips,
  // and for each row the maxima of 16 keys each and four partial sums of each of these.
  constexpr int sliced_bytes() const {
    return query_tile() * (cuda::padded_row_bytes(head_dim) + cuda::padded_row_bytes(key_tile)) +
           stages * kStripKeys * cuda::padded_row_bytes(head_dim_v) + query_tile() * (key_tile / 16) * (1 + 4) * 4;
  }
  // Shared memory of a CTA: Q, stages of K and V, and 32 resolved addresses of tiles. Rows are padded to 64 columns.
  constexpr int shared_bytes() const {
    constexpr int kAddresses = 32 * 48;
    if (slices > 1) return sliced_bytes() + kAddresses;
    const int k_row = cuda::padded_row_bytes(head_dim);
    return query_tile() * k_row + stages * key_tile * (k_row + cuda::padded_row_bytes(head_dim_v)) + kAddresses;
  }
};

// The rows of the table below that kernels are compiled for. Chosen by speed on an H200
// (bench/notes/attention-portable.md).
inline constexpr AttentionConfig kAttentionConfigs[] = {
    {64, 64, /*key_tile=*/128, /*warps=*/4, /*rows_of_warp=*/32, /*stages=*/2, /*ctas=*/2, /*columns_at_once=*/1},
    {96, 96, 64, 4, 32, 2, 2, 2},
    {128, 128, 64, 4, 32, 2, 2, 1},
    {192, 128, 64, 4, 32, 1, 2, 1},
    {256, 256, 64, 4, 16, 1, 2, 1, /*seam=*/false},
    {512, 512, 64, /*warps=*/8, 32, /*stages=*/3, /*ctas=*/1, /*columns_at_once=*/4, true, /*slices=*/8},
    {576, 512, 64, 8, 32, 3, 1, 4, true, 8},
};

// The one that is compiled for these head dims.
consteval AttentionConfig config_for(int head_dim, int head_dim_v) {
  return cuda::config_of_dims(kAttentionConfigs, head_dim, head_dim_v);
}

// The configuration for a spec; none: the kernel can't do it, and attention_missing() says why.
std::optional<AttentionConfig> choose_config(const AttentionSpec& spec);
// See KernelRow::missing.
std::vector<std::string> attention_missing(const AttentionSpec& spec);

// One line, e.g. "tile 128x64, 4 warps of 32 rows, 2 stages of keys, 97.5 KiB".
std::string describe(const AttentionConfig& config);
// All of them, with the head dims in front. See KernelRow::configs.
std::vector<std::string> attention_configs();

}  // namespace ringattn::sm80
