// SPDX-License-Identifier: Apache-2.0
// Configurations and parameters of sm90_linear. kernels/instances.cmake lists the instantiations.
#pragma once

#include <cuda.h>
#include <vector_types.h>

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

  static constexpr int kRows = 128;
  bool operator==(const ManyRowsConfig&) const = default;
  constexpr int columns() const { return gated ? sums / 2 : sums; }  // of y
  constexpr int stage_bytes() const { return (kRows + sums) * cuda::kPanelRowBytes; }
  // fp32 sums of the first four leaves of a tile.
  constexpr int stash_bytes() const { return leaves ? kRows * sums * 4 : 0; }
  // A panel of y for each of the two warpgroups, [64 rows][64 columns].
  static constexpr int kOutBytes = 2 * 64 * cuda::kPanelRowBytes;
  constexpr int shared_bytes() const {
    return cuda::aligned_shared_bytes(stages * (stage_bytes() + 16) + stash_bytes() + kOutBytes, 1024);
  }
};

inline constexpr ManyRowsConfig kNarrowTiles{128, false, false, 6};
inline constexpr ManyRowsConfig kWideTiles{192, false, false, 5};
inline constexpr ManyRowsConfig kGatedTiles{128, true, false, 6};
inline constexpr ManyRowsConfig kLeafTiles{128, false, true, 4};
inline constexpr ManyRowsConfig kGatedLeafTiles{128, true, true, 4};
static_assert(kWideTiles.shared_bytes() <= 227 * 1024 && kNarrowTiles.shared_bytes() <= 227 * 1024);
static_assert(kLeafTiles.shared_bytes() <= 227 * 1024);

struct ManyRowsParams {
  cuda::LinearGemm gemm;
  // The CTAs of a pair have the same columns and consecutive rows, or the same rows and consecutive columns.
  bool shares_weights;
  bool stores_by_tma;      // y is aligned
  std::int32_t swizzle;    // pairs of tiles of rows in an L2 swizzle group
  CUtensorMap x;           // box [64 rows, 64 of K]
  CUtensorMap weights[2];  // box [half of `sums`, 64 of K]
  CUtensorMap y;           // box [64 rows, 64 columns]
};

// Few rows: weights are operand A and x is operand B, so a tile has 64 columns of y for each warpgroup, and 8 to 64
// rows.
struct FewRowsConfig {
  int rows = 8;
  int warpgroups = 1;
  bool gated = false;

  bool operator==(const FewRowsConfig&) const = default;
  constexpr int matrices() const { return gated ? 2 : 1; }
  constexpr int columns() const { return 64 * warpgroups; }
  constexpr int weight_bytes() const { return columns() * matrices() * cuda::kPanelRowBytes; }
  constexpr int stage_bytes() const { return weight_bytes() + rows * cuda::kPanelRowBytes; }
  constexpr int stages() const { return (225 * 1024) / (stage_bytes() + 16); }
  constexpr int threads() const { return 128 * warpgroups + 32; }
  constexpr int shared_bytes() const { return cuda::aligned_shared_bytes(stages() * (stage_bytes() + 16), 1024); }
  constexpr int sums_bytes() const { return columns() * matrices() * rows * 4; }  // of a chain
};

constexpr FewRowsConfig few_rows_config(int rows, int warpgroups, bool gated) { return {rows, warpgroups, gated}; }

struct FewRowsParams {
  cuda::LinearGemm gemm;
  std::int32_t tiles;        // of columns
  std::int32_t tile_blocks;  // K blocks of 64 in all chains of a tile
  CUtensorMap x;             // box [rows of the configuration, 64 of K]
  CUtensorMap weights[2];    // box [64 rows, 64 of K]
  std::uint32_t* counters;   // [slots]: chains whose sums are in memory
  float4* sums;              // [slots, chains, sums of a tile]
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
