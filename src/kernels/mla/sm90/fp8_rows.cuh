// SPDX-License-Identifier: Apache-2.0
// Dequantization of the FP8 latent cache (kernels/quant/latent_rows.hpp) in shared memory. TMA loads the fp8 values, in
// blocks of 128 columns, into those panels of a tile that are dequantized last. Rotary keys are loaded to their final
// place. Warps dequantize the blocks in order, with the bits of dequantize_latent_rows(). The tile then is as TMA would
// have loaded it from a 16-bit latent cache.
//
// Panels 0 to 7 of a tile hold its latent columns, two panels per block of 128. The fp8 values of block k are loaded
// into panel 4 + k and dequantized to panels 2k and 2k + 1. The fp8 values that these panels held have been read by
// then, or are being read by the threads of the same row, which are in one warp.
#pragma once

#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/decode/sm90/dequantize.cuh"
#include "kernels/mla/sm90/config.hpp"
#include "kernels/mla/sm90/mla_params.hpp"

namespace ringattn::sm90 {

inline constexpr int kScaleBlocks = kLatentDimV / kLatentScaleBlock;
inline constexpr int kFp8Panel = 4;  // the panel that the fp8 values of block 0 are loaded into
static_assert(kScaleBlocks == 4 && kLatentScaleBlock == kPanelRowBytes && kLatentScaleBlock == 2 * kPanelColumns);

// Dequantizes 16 · kChunks values of a row, from 16-byte chunk `first` of their block on. They go to one panel.
template <class Element, int kChunks>
__device__ __forceinline__ void dequantize_fp8(std::uint32_t fp8, std::uint32_t panel, int row, int first,
                                               float scale) {
  uint4 words[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) words[i] = cuda::load_shared_16(fp8 + cuda::swizzled(row, first + i));
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const uint2 a = eight_bits<Element, true>(words[i].x, scale);
    const uint2 b = eight_bits<Element, true>(words[i].y, scale);
    const uint2 c = eight_bits<Element, true>(words[i].z, scale);
    const uint2 d = eight_bits<Element, true>(words[i].w, scale);
    const int chunk = 2 * (first % 4 + i);
    cuda::store_shared(panel + cuda::swizzled(row, chunk), uint4{a.x, a.y, b.x, b.y});
    cuda::store_shared(panel + cuda::swizzled(row, chunk + 1), uint4{c.x, c.y, d.x, d.y});
  }
}

// One lane's part of a tile's rows.
template <int kThreads>  // per row: 1, 2 or 4 lanes of a warp
class Fp8Row {
 public:
  static constexpr int kRows = 32 / kThreads;                       // per warp
  static constexpr int kChunks = kThreads == 1 ? 4 : 8 / kThreads;  // dequantized at a time
  static constexpr int kTimes = 8 / (kThreads * kChunks);           // per block

  // `first`: the warp's first row.
  __device__ __forceinline__ Fp8Row(const MlaFp8Params& p, int first)
      : p_(p), row_(first + thread_of_cta() % 32 % kRows), chunk_(thread_of_cta() % 32 / kRows * kChunks) {}

  // The scales of this lane's row of a tile. 0 if the row has no key.
  __device__ __forceinline__ float4 scales(const DecodeWorkTile& work_tile, int tile) const {
    const int key = tile * kMlaKeyTile + row_;
    if (tile >= work_tile.end || key >= work_tile.seq_info.length) return {0.0F, 0.0F, 0.0F, 0.0F};
    const int here = key - work_tile.lag;
    const DecodeParams& step = p_.step;
    const bool paged = step.pages != nullptr;
    const int page = paged ? __ldcg(step.pages + work_tile.sequence * step.table_stride + (here >> step.page_log))
                           : work_tile.sequence;
    const int row = paged ? here & ((1 << step.page_log) - 1) : here;
    return __ldcg(reinterpret_cast<const float4*>(p_.scales.at(page, row, work_tile.kv_head)));
  }

  // Dequantizes this lane's chunks of a block.
  template <class Element>
  __device__ __forceinline__ void dequantize(std::uint32_t fp8, std::uint32_t left, std::uint32_t right,
                                             float scale) const {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const int first = chunk_ + i * kChunks;
      dequantize_fp8<Element, kChunks>(fp8, first < 4 ? left : right, row_, first, scale);
    }
  }

  static __device__ __forceinline__ float of_block(const float4& scales, int block) {
    return block == 0 ? scales.x : block == 1 ? scales.y : block == 2 ? scales.z : scales.w;
  }

 private:
  const MlaFp8Params& p_;
  const int row_;
  const int chunk_;  // this lane's first chunk of 16 values of a block
};

}  // namespace ringattn::sm90
