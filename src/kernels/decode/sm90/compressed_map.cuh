// SPDX-License-Identifier: Apache-2.0
// The sliced kernel over a quantized cache: its configuration, and its shared memory after that of ColumnSliceMap.
//
//   barriers
//   qparams           [warps with outputs][scales, zero points][key_tile rows]  of a V tile, two bytes each
//   quantized_stage K [K stages]  quantized values of a tile, [key_tile rows], swizzled as elements in rows of the same
//                                 bytes, then 16 bytes of qparams for each row
//   quantized_stage V [V stages]  the same for this CTA's columns
//
// The launch sets the number of stages: 4-bit values take half of the memory of 8-bit ones. There are no tiles of
// elements, since values are dequantized in registers.
#pragma once

#include "kernels/decode/sm90/compressed_params.hpp"
#include "kernels/decode/sm90/launch.cuh"
#include "kernels/decode/sm90/sliced_map.cuh"

namespace ringattn::sm90 {

inline constexpr int kMaxQuantizedStages = 16;    // stages of K, or of V
inline constexpr int kQuantizedAlignment = 1024;  // the swizzle pattern repeats after 1,024 bytes
inline constexpr int kQparamPitch = 16;           // bytes from row to row

// A CTA that is its own cluster scores all tiles, so it has two scoring warpgroups.
template <class Element_, AttentionConfig kAttention, int kSlices_>
struct CompressedConfig : ColumnSliceConfig<Element_, kAttention, kSlices_, kSlices_ == 1 ? 2 : 1> {
  using Plain = ColumnSliceConfig<Element_, kAttention, kSlices_, kSlices_ == 1 ? 2 : 1>;
  static constexpr int kKBytes = 0;
  static constexpr int kVBytes = 0;
  static constexpr int kKStages = 1;
  static constexpr int kVStages = 2;
  static constexpr bool kResumes = false;  // quantized prefixes are not shared
  static_assert(Plain::kKeyTile % (16 * Plain::kScoringWarpgroupWarps) == 0 && Plain::kDim % 64 == 0);
  static_assert(Plain::kDimV == Plain::kDim);
};

template <class C>
struct CompressedMap : ColumnSliceMap<C> {
  static constexpr int kBarrierOffset = (ColumnSliceMap<C>::kBytes + 7) / 8 * 8;
  static constexpr int kQuantizedBarriers = 4 * kMaxQuantizedStages;
  static constexpr int kQparamOffset = kBarrierOffset + kQuantizedBarriers * kBarrierBytes;
  static constexpr int kQparamBytes = 2 * C::kKeyTile * 2;  // bytes for each output warp
  // The stages are aligned, since the reserved bytes are a multiple of the alignment.
  static constexpr int kQuantizedOffset = (kQparamOffset + C::kOutWarps * kQparamBytes + kQuantizedAlignment - 1) /
                                          kQuantizedAlignment * kQuantizedAlignment;
  static constexpr int kQuantizedCapacity = kMaxSharedBytes - kQuantizedOffset;
  static_assert(kReservedBytes % kQuantizedAlignment == 0);

  // `values`: of V. The stages of K come first.
  __device__ __forceinline__ std::uint32_t quantized_stage(const CompressedParams& p, bool values,
                                                           std::uint32_t stage) const {
    return shared_base<C>() + static_cast<std::uint32_t>(kQuantizedOffset) +
           (values ? static_cast<std::uint32_t>(p.k.stages * p.k.stage_bytes) +
                         stage * static_cast<std::uint32_t>(p.v.stage_bytes)
                   : stage * static_cast<std::uint32_t>(p.k.stage_bytes));
  }
  // A tile's scales and zero points, two bytes each, which an output warp reorders for itself.
  __device__ __forceinline__ std::uint32_t qparams(int out_warp) const {
    return shared_base<C>() + static_cast<std::uint32_t>(kQparamOffset + out_warp * kQparamBytes);
  }
  // Barriers of a stage: full (loaded) and empty (released by every reader).
  __device__ __forceinline__ std::uint32_t quantized_full(bool values, std::uint32_t stage) const {
    return shared_base<C>() + static_cast<std::uint32_t>(kBarrierOffset) +
           ((values ? kMaxQuantizedStages : 0U) + stage) * static_cast<std::uint32_t>(kBarrierBytes);
  }
  __device__ __forceinline__ std::uint32_t quantized_empty(bool values, std::uint32_t stage) const {
    return quantized_full(values, 2 * kMaxQuantizedStages + stage);
  }
};

// Offset of 16 bytes of a row in rows of `row_bytes`, a power of 2 up to 128, with TMA's swizzle.
__device__ __forceinline__ std::uint32_t swizzled_chunk(int row_bytes, int row, int chunk) {
  const auto at = static_cast<std::uint32_t>(row * row_bytes + chunk * 16);
  return at ^ ((at >> 7 & static_cast<std::uint32_t>(row_bytes / 16 - 1)) << 4);
}

__device__ __forceinline__ std::uint32_t load_word(std::uint32_t address) {
  std::uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ uint2 load_words(std::uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
  return words;
}

// The scale of 8-bit values whose rows have none.
__device__ __forceinline__ float table_scale(const QuantizedTensor& tensor, int head) {
  return __ldcg(reinterpret_cast<const float*>(tensor.table) + (tensor.scales == ScaleGrain::kHead ? head : 0));
}

// PipelineState of a ring with `stage_count` stages.
struct RuntimePipelineState {
  std::uint32_t index = 0, parity = 0;

  __device__ __forceinline__ void advance(int stage_count) {
    const bool around = index + 1 == static_cast<std::uint32_t>(stage_count);
    index = around ? 0 : index + 1;
    parity ^= around ? 1U : 0U;
  }
};

// One thread calls it, as init_sliced_barriers().
template <class C>
__device__ __forceinline__ void init_quantized_barriers(const CompressedParams& p, const CompressedMap<C>& map) {
  // TMA's arrival, and if lanes copy the qparams, one from each lane of the producer warp.
  const auto arrivals = [](const QuantizedTensor& t) { return 1 + (t.qparam_bytes > 0 && !t.qparams_mapped ? 32 : 0); };
  const int of_k = arrivals(p.k), of_v = arrivals(p.v);
#pragma unroll
  for (std::uint32_t stage = 0; stage < kMaxQuantizedStages; ++stage) {
    barrier_init(map.quantized_full(false, stage), of_k);
    barrier_init(map.quantized_empty(false, stage), C::kScoringWarpgroupWarps);
    barrier_init(map.quantized_full(true, stage), of_v);
    barrier_init(map.quantized_empty(true, stage), C::kOutWarps);
  }
  barrier_init_fence();
}

}  // namespace ringattn::sm90
