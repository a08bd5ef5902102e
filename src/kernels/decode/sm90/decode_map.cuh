// SPDX-License-Identifier: Apache-2.0
// Shared memory of a decode CTA: layout, writers and readers.
//
//   Q          [64 rows]                written and read by the consumer warpgroup
//   K, V       [stages][key_tile rows]  written by TMA, which the producer warp issues; read by the consumers
//   barriers
//   work_tiles [sequences + 1]          how many work tiles come before each sequence (work_tiles.cuh)
//
// Tiles are in panels, as in prefill.
#pragma once

#include "kernels/attention/sm90/shared_map.cuh"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/decode/sm90/config.hpp"

namespace ringattn::sm90 {

// Start of a CTA's shared memory. In a cluster the address also names the CTA: otherwise copies and arrivals would go
// to the first CTA.
template <class C>
__device__ __forceinline__ std::uint32_t shared_base() {
  if constexpr (C::kSlices > 1) return map_to_cta(kReservedBytes, rank_in_cluster());
  return kReservedBytes;
}

template <class C>
struct DecodeMap {
  static constexpr int kQOffset = 0;
  static constexpr int kKOffset = C::kQCapacity;
  static constexpr int kVOffset = kKOffset + C::kStages * C::kKBytes;
  static constexpr int kBarrierOffset = kVOffset + C::kStages * C::kVBytes;
  static constexpr int kWorkTileOffset = kBarrierOffset + 4 * C::kStages * kBarrierBytes;
  static constexpr int kBytes = kWorkTileOffset + (kMaxDecodeSequences + 1) * 4;
  static_assert(C::kStages >= 2 && kBytes <= kMaxSharedBytes);

  __device__ std::uint32_t q() const { return at(kQOffset, 0, 0); }
  __device__ std::uint32_t k(std::uint32_t stage) const { return at(kKOffset, stage, C::kKBytes); }
  __device__ std::uint32_t v(std::uint32_t stage) const { return at(kVOffset, stage, C::kVBytes); }
  __device__ std::uint32_t work_tiles_before(int sequence) const {
    return at(kWorkTileOffset, static_cast<std::uint32_t>(sequence), 4);
  }
  // Barriers of a K/V stage: full (TMA landed) and empty (every consumer warp has released it).
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return at(kBarrierOffset, stage, kBarrierBytes); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return k_full(C::kStages + stage); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const { return k_full(2 * C::kStages + stage); }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const { return k_full(3 * C::kStages + stage); }

 private:
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return shared_base<C>() + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// One thread calls it.
template <class C>
__device__ __forceinline__ void init_decode_barriers(const DecodeMap<C>& map) {
  for (std::uint32_t i = 0; i < C::kStages; ++i) {
    barrier_init(map.k_full(i), 1);
    barrier_init(map.v_full(i), 1);
    barrier_init(map.k_empty(i), kDecodeConsumerThreads / 32);
    barrier_init(map.v_empty(i), kDecodeConsumerThreads / 32);
  }
  barrier_init_fence();
}

}  // namespace ringattn::sm90
