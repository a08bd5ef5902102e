// SPDX-License-Identifier: Apache-2.0
// AttentionState of 8-bit latents (kernels/latent_rows.hpp) on their way into a tile. The copy engine brings fp8, 128
// of each row at a time, into panels of the tile that are filled last; rotary keys go where they belong. Warps then
// make elements of the fp8, block by block, with the bits of dequantize_latent_rows(): what they leave is what the copy
// engine brings of latents of 16 bits.
//
// A tile's panels 0 … 7 have its columns, two of them those of one block of 128. The fp8 of the k-th block that is
// expanded lie in panel 4 + k, and become panels 2k and 2k + 1: those have been read, or are being read by the threads
// of the same row, which are in one warp.
#pragma once

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/sm90/decode/dequantize.cuh"
#include "kernels/sm90/latent/config.hpp"
#include "kernels/sm90/latent/mla_params.hpp"

namespace ringattn::sm90 {

inline constexpr int kScaleBlocks = kLatentDimV / kLatentScaleBlock;
inline constexpr int kFp8Panel = 4;  // the panel with the fp8 of the first block
static_assert(kScaleBlocks == 4 && kLatentScaleBlock == kPanelRowBytes && kLatentScaleBlock == 2 * kPanelColumns);

// kChunks · 16 fp8 of a row, from the chunk `first` of their block on: they become elements of one panel.
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

// Which rows of a tile a lane expands, and what it has to know of them.
template <int kThreads>  // of a row: 1, 2 or 4 lanes of a warp
class Fp8Row {
 public:
  static constexpr int kRows = 32 / kThreads;                       // of a warp
  static constexpr int kChunks = kThreads == 1 ? 4 : 8 / kThreads;  // at a time
  static constexpr int kTimes = 8 / (kThreads * kChunks);           // for a block

  // `first`: the warp's first row.
  __device__ __forceinline__ Fp8Row(const MlaFp8Params& p, int first)
      : p_(p), row_(first + thread_of_cta() % 32 % kRows), chunk_(thread_of_cta() % 32 / kRows * kChunks) {}

  // The scales of this lane's row of a tile; 0 where no key of the sequence is.
  __device__ __forceinline__ float4 scales(const DecodeWorkTile& work_tile, int tile) const {
    const int key = tile * kMlaKeyTile + row_;
    if (tile >= work_tile.end || key >= work_tile.of.length) return {0.0F, 0.0F, 0.0F, 0.0F};
    const int here = key - work_tile.lag;
    const DecodeParams& step = p_.step;
    const bool paged = step.pages != nullptr;
    const int page = paged ? __ldcg(step.pages + work_tile.sequence * step.table_stride + (here >> step.page_log))
                           : work_tile.sequence;
    const int row = paged ? here & ((1 << step.page_log) - 1) : here;
    return __ldcg(reinterpret_cast<const float4*>(p_.scales.at(page, row, work_tile.kv_head)));
  }

  // This lane's share of a block.
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
  const int chunk_;  // of 16 fp8, this lane's first of a block
};

}  // namespace ringattn::sm90
