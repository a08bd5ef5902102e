// SPDX-License-Identifier: Apache-2.0
// The sliced kernel over a compressed cache: its configuration, and what lies in shared memory behind what SlicedMap
// has.
//
//   packed K  [K stages]   codes of a tile, [key_tile rows], as they lie in the cache, and the numbers of its rows; the
//                          copy engine and the fetching warp write them, the converting warps read them
//   packed V  [V stages]   the same of this CTA's columns
//   barriers
//
// How many stages there are is up to the launch: codes of 4 bits take half of the room.
#pragma once

#include "kernels/sm90/decode/compressed_params.hpp"
#include "kernels/sm90/decode/launch.cuh"
#include "kernels/sm90/decode/sliced_map.cuh"

namespace ringattn::sm90 {

inline constexpr int kConvertWarps = 4;  // of K, and as many of V
inline constexpr int kMostPacked = 16;   // stages of a tensor
inline constexpr int kPackedAlignment = 128;

// Elements of K and V have fewer stages than where they are fetched: what is on its way waits in the packed ones.
template <class Element_, FoldConfig kFold, int kSlices_>
struct CompressedConfig {
  using Plain = SlicedConfig<Element_, kFold, kSlices_>;
  using Element = Element_;
  using Whole = typename Plain::Whole;
  static constexpr int kDim = Plain::kDim;
  static constexpr int kDimV = Plain::kDimV;
  static constexpr int kKeyTile = Plain::kKeyTile;
  static constexpr int kRounds = Plain::kRounds;
  static constexpr int kSlices = Plain::kSlices;
  static constexpr int kSliceColumns = Plain::kSliceColumns;
  static constexpr int kVRowBytes = Plain::kVRowBytes;
  static constexpr int kKBytes = Plain::kKBytes;
  static constexpr int kVBytes = Plain::kVBytes;
  static constexpr int kOutWarps = Plain::kOutWarps;
  static constexpr int kScoreBlocks = Plain::kScoreBlocks;
  static constexpr int kSlots = Plain::kSlots;
  static constexpr int kKStages = 2;
  static constexpr int kVStages = kVBytes > 8192 ? 2 : 3;
  static constexpr int kFillers = kConvertWarps;
  static constexpr int kThreads = Plain::kThreads + 2 * 32 * kConvertWarps;
  // Registers of a thread, by warpgroup; as the kernel starts all have as many.
  static constexpr int kScoreRegisters = 144;
  static constexpr int kOutRegisters = 128;
  static constexpr int kHelpRegisters = 64;
  static constexpr int kConvertRegisters = 72;
  static_assert(kOutWarps == 4 && kKeyTile == 32 * kConvertWarps && kDim % 64 == 0 && kDimV == kDim);
  static_assert(kScoreRegisters + kOutRegisters + kHelpRegisters + 2 * kConvertRegisters <= 5 * 96);
};

template <class C>
struct CompressedMap : SlicedMap<C> {
  static constexpr int kBarrierOffset = (SlicedMap<C>::kBytes + 7) / 8 * 8;
  // Behind what the device keeps, whose size is a multiple of the alignment.
  static constexpr int kPackedOffset =
      (kBarrierOffset + 4 * kMostPacked * kBarrierBytes + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
  static constexpr int kPackedRoom = kMostSharedBytes - kPackedOffset;
  static_assert(kReservedBytes % kPackedAlignment == 0);

  // `values`: of V. Stages of K come first.
  __device__ __forceinline__ std::uint32_t packed(const CompressedParams& p, bool values, std::uint32_t stage) const {
    return here() + static_cast<std::uint32_t>(kPackedOffset) +
           (values ? static_cast<std::uint32_t>(p.k.stages * p.k.stage_bytes) +
                         stage * static_cast<std::uint32_t>(p.v.stage_bytes)
                   : stage * static_cast<std::uint32_t>(p.k.stage_bytes));
  }
  // Of a stage: it has arrived; who converts it is done with it.
  __device__ __forceinline__ std::uint32_t packed_full(bool values, std::uint32_t stage) const {
    return here() + static_cast<std::uint32_t>(kBarrierOffset) +
           ((values ? kMostPacked : 0U) + stage) * static_cast<std::uint32_t>(kBarrierBytes);
  }
  __device__ __forceinline__ std::uint32_t packed_empty(bool values, std::uint32_t stage) const {
    return packed_full(values, 2 * kMostPacked + stage);
  }

 private:
  // As SlicedMap's base.
  __device__ __forceinline__ static std::uint32_t here() {
    if constexpr (C::kSlices > 1) return in_cta(kReservedBytes, rank_in_cluster());
    return kReservedBytes;
  }
};

// A place of a ring of so many places, and the parity of its turn, for those who take one after the other.
struct PackedLap {
  std::uint32_t place = 0, parity = 0;

  __device__ __forceinline__ void advance(int places) {
    const bool around = place + 1 == static_cast<std::uint32_t>(places);
    place = around ? 0 : place + 1;
    parity ^= around ? 1U : 0U;
  }
};

// By the first warp.
template <class C>
__device__ __forceinline__ void init_packed_barriers(const CompressedParams& p, const CompressedMap<C>& map) {
  const auto lane = threadIdx.x;
  const bool values = lane >= kMostPacked;
  const std::uint32_t stage = lane % kMostPacked;
  // The copies of codes, and those of numbers, which each lane of the fetching warp tells of.
  barrier_init(map.packed_full(values, stage), 1 + ((values ? p.v : p.k).number_bytes > 0 ? 32 : 0));
  barrier_init(map.packed_empty(values, stage), kConvertWarps);
  barrier_init_fence();
}

}  // namespace ringattn::sm90
