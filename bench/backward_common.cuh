// SPDX-License-Identifier: Apache-2.0
// The backward spike's shared parts: kernel parameters, warpgroup GEMMs, and partial sums of splits. head_dim is 128,
// the mask causal, the dtype bf16.
#pragma once

#include <cstdint>

#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma.cuh"

namespace ringattn::spike {

using bf16 = __nv_bfloat16;
using cuda::kPanelRowBytes;
using cuda::panel_bytes;

inline constexpr int kDim = 128;
inline constexpr int kRowBytes = kDim * 2;
inline constexpr int kQueryTile = 64;   // positions of one query head
inline constexpr int kKvSplit = 8192;   // keys; dQ of a KV split is accumulated from zero
inline constexpr int kSplitTiles = 64;  // query tiles; dK and dV of a query split too
inline constexpr int kNoMoreWork = -1;
inline constexpr int kScratchFloats =
    4 * 64 * kDim;                              // of a CTA: up to four warpgroups' dQ, or two warpgroups' dK and dV
inline constexpr int kSpillTile = 64 * 64 * 2;  // bytes of a tile of dSᵀ

// Tensors are [batch · seq, heads, 128]; lse2 and delta are [heads, batch · seq].
struct Problem {
  CUtensorMap q, dout;  // boxes of 64 rows
  CUtensorMap k, v;     // boxes of the kernel's key tile
  const float* lse2;    // LSE · log2 e
  const float* delta;   // rowsum(dO ∘ O) − dLSE
  bf16 *dq, *dk, *dv;
  std::uint32_t* spill;  // dSᵀ, a tile of 64 keys and 64 queries in kSpillTile bytes: spill_tile()
  std::uint32_t
      spill_mask;  // of tile numbers: all ones, or a smaller workspace whose tiles are overwritten, to time it
  float* scratch;  // merged splits, kScratchFloats for each CTA
  int* taken;      // work tiles claimed so far, beyond each CTA's first
  int batch, seq, heads, kv_heads;
  int swizzle_heads;    // KV heads of an L2 swizzle group; heads of all sequences count
  float scale, scale2;  // softmax_scale, and times log2 e
};

// Index of a tile of dSᵀ. Inside a tile, 16-byte pieces are [16 queries, thread of the producing warpgroup].
__device__ __forceinline__ std::uint32_t spill_tile(const Problem& p, int head, int sequence, int query_tile,
                                                    int key_tile) {
  const int group = p.heads / p.kv_heads, tiles = p.seq / 64;
  const int row = ((sequence * p.kv_heads + head / group) * tiles + query_tile) * group + head % group;
  return static_cast<std::uint32_t>(row * tiles + key_tile);
}
__device__ __forceinline__ char* spill_address(const Problem& p, std::uint32_t tile) {
  return reinterpret_cast<char*>(p.spill) + std::int64_t{tile & p.spill_mask} * kSpillTile;
}

__device__ __forceinline__ std::uint32_t pack(float low, float high) { return cuda::MmaTraits<bf16>::pack(low, high); }

// Issues D = A · Bᵀ. A [64, 128] and B [kColumns, 128] are in shared memory, in panels of kRowsA and kRowsB rows.
template <int kColumns, int kRowsA, int kRowsB>
__device__ __forceinline__ void multiply_rows(float (&d)[kColumns / 8][4], std::uint32_t a_tile, std::uint32_t b_tile) {
  const std::uint32_t a = sm90::of_warp(sm90::descriptor_low(a_tile));
  const std::uint32_t b = sm90::of_warp(sm90::descriptor_low(b_tile));
  sm90::pin(d);
  sm90::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const auto at = [step](int bytes) { return static_cast<std::uint32_t>((step / 4 * bytes + step % 4 * 32) >> 4); };
    sm90::Wgmma<bf16, kColumns>::ss(d, sm90::descriptor(a + at(panel_bytes(kRowsA))),
                                    sm90::descriptor(b + at(panel_bytes(kRowsB))), step > 0);
  }
  sm90::wgmma_commit();
}

// Issues D += A · B, or D = A · B where `first`. A [64, 16 · kSteps] is in registers, B [16 · kSteps, 128] in shared
// memory.
template <int kSteps, int kRowsB>
__device__ __forceinline__ void add_product(float (&d)[kDim / 8][4], const std::uint32_t (&a)[kSteps][4],
                                            std::uint32_t b_tile, bool first) {
  const std::uint32_t b = sm90::of_warp(sm90::descriptor_low(b_tile, panel_bytes(kRowsB)));
  sm90::pin(d);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {  // ptxas serialises wgmma where packing sinks behind the fence
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" ::"r"(a[step][i]) : "memory");
  }
  sm90::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    sm90::Wgmma<bf16, kDim>::rs(d, a[step],
                                sm90::descriptor(b + static_cast<std::uint32_t>(step * 16 * kPanelRowBytes >> 4)),
                                step > 0 || !first);
  }
  sm90::wgmma_commit();
}

// Merged splits are stored in fragment order, 16 bytes a thread, so that each thread reads what it wrote.
__device__ __forceinline__ float* scratch_of_thread(float* scratch) {
  return scratch + sm90::thread_of_warpgroup() * 4;
}
// Stores the first split and adds later ones by red.add, which rounds to nearest and flushes subnormals.
__device__ __forceinline__ void merge_split(float* mine, const float (&d)[kDim / 8][4], bool first) {
  if (first) {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(mine + j * 4 * sm90::kWarpgroup),
                   "f"(d[j][0]), "f"(d[j][1]), "f"(d[j][2]), "f"(d[j][3])
                   : "memory");
    }
  } else {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(mine + j * 4 * sm90::kWarpgroup),
                   "f"(d[j][0]), "f"(d[j][1]), "f"(d[j][2]), "f"(d[j][3])
                   : "memory");
    }
  }
}
// Adds the merged splits to the last one, with the rounding of red.add.
__device__ __forceinline__ void add_merged(const float* mine, float (&d)[kDim / 8][4]) {
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    float b[4];
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(b[0]), "=f"(b[1]), "=f"(b[2]), "=f"(b[3])
                 : "l"(mine + j * 4 * sm90::kWarpgroup)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(d[j][i]) : "f"(b[i]), "f"(d[j][i]));
  }
}
// Writes a warpgroup's 64 rows, of `stride` elements, multiplied by `factor` and rounded.
__device__ __forceinline__ void write_rows(bf16* first, std::int64_t stride, const float (&d)[kDim / 8][4],
                                           float factor) {
  bf16* row = first + sm90::tile_row_of_thread() * stride + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<std::uint32_t*>(row + half * 8 * stride + j * 8) =
          pack(d[j][2 * half] * factor, d[j][2 * half + 1] * factor);
    }
  }
}

}  // namespace ringattn::spike
