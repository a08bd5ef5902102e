// SPDX-License-Identifier: Apache-2.0
// How sm80_fold computes a FoldSpec: tiles, warps and shared memory. A pure function of the description, so that ranks
// agree on it; launching is elsewhere (fold.hpp).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/cuda/config_table.hpp"
#include "kernels/cuda/device/panels.hpp"
#include "kernels/fold.hpp"

namespace ringattn::sm80 {

struct FoldConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  int key_tile = 0;         // keys of a tile
  int warps = 0;            // of a CTA
  int rows_of_warp = 0;     // query rows, a multiple of 16
  int stages = 0;           // K and V tiles in shared memory; 1: K and V of a tile are fetched in turn
  int ctas = 0;             // of a multiprocessor: what registers and shared memory are cut for
  int columns_at_once = 0;  // blocks of 16 columns of O that P V works on side by side
  bool seam = true;         // see TileStep::fold()

  constexpr int query_tile() const { return warps * rows_of_warp; }
  constexpr int threads() const { return 32 * warps; }
  // Scratch memory of a multiprocessor: for each CTA the rows' closed groups, and whether somebody has them.
  constexpr int scratch_floats() const { return ctas * (query_tile() * (head_dim_v + 2) + 1); }
  // Shared memory of a CTA: Q, stages of K and V, and 32 resolved addresses of tiles. Rows are padded to 64 columns.
  constexpr int shared_bytes() const {
    const int k_row = cuda::padded_row_bytes(head_dim);
    return query_tile() * k_row + stages * key_tile * (k_row + cuda::padded_row_bytes(head_dim_v)) + 32 * 48;
  }
};

// The rows of the table below that kernels are compiled for. Chosen by speed on an H200 (bench/NOTES.md).
inline constexpr FoldConfig kFoldConfigs[] = {
    {64, 64, /*key_tile=*/128, /*warps=*/4, /*rows_of_warp=*/32, /*stages=*/2, /*ctas=*/2, /*columns_at_once=*/1},
    {96, 96, 64, 4, 32, 2, 2, 2},
    {128, 128, 64, 4, 32, 2, 2, 1},
    {192, 128, 64, 4, 32, 1, 2, 1},
    {256, 256, 64, 4, 16, 1, 2, 1, /*seam=*/false},
};

// The one that is compiled for these head dims.
consteval FoldConfig config_for(int head_dim, int head_dim_v) {
  return cuda::config_of_dims(kFoldConfigs, head_dim, head_dim_v);
}

// The configuration for a spec; none: the kernel can't do it, and fold_missing() says why.
std::optional<FoldConfig> choose_config(const FoldSpec& spec);
// See KernelRow::missing.
std::vector<std::string> fold_missing(const FoldSpec& spec);

// One line, e.g. "tile 128x64, 4 warps of 32 rows, 2 stages of keys, 97.5 KiB".
std::string describe(const FoldConfig& config);
// All of them, with the head dims in front. See KernelRow::configs.
std::vector<std::string> fold_configs();

}  // namespace ringattn::sm80
