// SPDX-License-Identifier: Apache-2.0
// Configurations and parameters of sm90_linear. kernels/instances.cmake lists the instantiations.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/linear/cuda/linear_gemm.hpp"

namespace ringattn::sm90 {

// Many rows: a CTA computes tiles of 128 rows × `sums` columns of sums (gated: half of them of each matrix).
struct ManyRowsConfig {
  int sums = 128;
  bool gated = false;
  bool leaves = false;
  int stages = 0;
  int panels = 1;  // of y, [64 rows][64 columns], for each of the two warpgroups

  static constexpr int kRows = 128;
  bool operator==(const ManyRowsConfig&) const = default;
  constexpr int columns() const { return gated ? sums / 2 : sums; }  // of y
  constexpr int stage_bytes() const { return (kRows + sums) * cuda::kPanelRowBytes; }
  // Whether registers have no room for all closed sums in addition to the current ones: then half of them are in shared
  // memory.
  constexpr bool halves() const { return sums > 192; }
  // fp32 sums of the first four leaves of a tile, or half of the closed sums of splits.
  constexpr int stash_bytes() const { return leaves ? kRows * sums * 4 : halves() ? kRows * sums * 2 : 0; }
  constexpr int out_bytes() const { return 2 * panels * 64 * cuda::kPanelRowBytes; }
  // y's panels are in the memory of the sums, which are read before.
  constexpr int stash_or_out_bytes() const { return std::max(stash_bytes(), out_bytes()); }
  constexpr int shared_bytes() const {
    return cuda::aligned_shared_bytes(stages * (stage_bytes() + 16) + stash_or_out_bytes(), 1024);
  }
};

inline constexpr ManyRowsConfig kNarrowTiles{128, false, false, 6, 2};
inline constexpr ManyRowsConfig kWideTiles{192, false, false, 4, 3};
inline constexpr ManyRowsConfig kWidestTiles{256, false, false, 3, 4};
inline constexpr ManyRowsConfig kGatedTiles{128, true, false, 6, 1};
inline constexpr ManyRowsConfig kWideGatedTiles{256, true, false, 3, 2};
inline constexpr ManyRowsConfig kLeafTiles{128, false, true, 5, 2};
inline constexpr ManyRowsConfig kGatedLeafTiles{128, true, true, 5, 1};
static_assert(kWideTiles.shared_bytes() <= 227 * 1024 && kNarrowTiles.shared_bytes() <= 227 * 1024);
static_assert(kWidestTiles.shared_bytes() <= 227 * 1024 && kLeafTiles.shared_bytes() <= 227 * 1024);

struct ManyRowsParams {
  cuda::LinearGemm gemm;
  // The CTAs of a pair have the same columns and consecutive rows, or the same rows and consecutive columns.
  bool shares_weights;
  bool stores_by_tma;      // y is aligned
  std::int32_t swizzle;    // pairs of tiles of rows in an L2 swizzle group
  CUtensorMap x;           // box [128 rows, 64 of K], or 64 rows if the pair shares them
  CUtensorMap weights[2];  // box [half of `sums`, 64 of K]
  CUtensorMap y;           // box [64 rows, 64 columns]
};

// Few rows: weights are operand A and x is operand B. A tile has up to 128 columns of y, one warpgroup for each 64, and
// 8 to 64 rows. How many columns is chosen for each launch, so that tiles divide evenly over the device.
struct FewRowsConfig {
  int rows = 8;
  bool gated = false;
  bool leaves = false;

  static constexpr int kMaxColumns = 128;
  static constexpr int kMaxThreads = kMaxColumns / 64 * 128 + 32;
  bool operator==(const FewRowsConfig&) const = default;
  constexpr int matrices() const { return gated ? 2 : 1; }
  // The two CTAs of a cluster load x together if it is a large part of the bytes to load.
  constexpr int cluster() const { return rows >= 32 ? 2 : 1; }
  constexpr int row_bytes() const { return rows * cuda::kPanelRowBytes; }
  constexpr int stage_bytes(int columns) const { return columns * matrices() * cuda::kPanelRowBytes + row_bytes(); }
  static constexpr int kSharedBytes = 222 * 1024;
  // A warpgroup always multiplies 64 columns. If its tile has fewer, it ignores the others.
  static constexpr int kUnusedBytes = 64 * cuda::kPanelRowBytes;
  constexpr int stages(int columns) const { return (kSharedBytes - 1024 - kUnusedBytes) / (stage_bytes(columns) + 16); }
  constexpr int sums_bytes(int columns) const {
    return (columns + 63) / 64 * 64 * matrices() * rows * 4;
  }  // of a chain
};

struct FewRowsParams {
  cuda::LinearGemm gemm;
  std::int32_t tile_columns;  // a multiple of 8
  std::int32_t warpgroups;
  std::int32_t stages;
  std::int32_t prefetched_blocks;  // K blocks of a CTA that it prefetches before the kernels before it are done
  std::int32_t tiles;              // or pairs of tiles, of a cluster's CTAs
  std::int32_t tile_blocks;        // K blocks of 64 in all chains of a tile
  bool shares_tiles;               // CTAs have ranges of (tile, chain), else of tiles
  CUtensorMap x;                   // box [rows of a CTA's part, 64 of K]
  CUtensorMap weights[2];          // box [tile_columns, 64 of K]
  std::uint32_t* counters;         // [slots]: chains whose sums are in memory
  float4* sums;                    // [slots, chains, sums of a tile]
};

inline constexpr int kFewRows = 64;
inline constexpr std::size_t kCounterBytes = 4096;  // FewRowsParams::counters of every device
// More chains than this are left to the kernel for many rows, since sums of shared tiles would need much memory.
inline constexpr int kMaxFewRowsChains = 32;

struct HopperLinearLauncher {
  void (*prepare)();
  void (*many_rows)(const ManyRowsParams& params, const ManyRowsConfig& config, int ctas, Stream stream);
  void (*few_rows)(const FewRowsParams& params, const FewRowsConfig& config, int ctas, Stream stream);
};

extern const HopperLinearLauncher linear_bf16;
extern const HopperLinearLauncher linear_fp16;

}  // namespace ringattn::sm90
