// SPDX-License-Identifier: Apache-2.0
// What lies where in the shared memory of a decoding CTA.
//
//   Q      [64 rows]             the attending warpgroup's own: it copies a work_tile's query rows there itself
//   K, V   [stages][key_tile rows]  the fetching warp has the copy engine write them, the attending warpgroup reads
//   them work_tiles  [sequences + 1]       how many work_tiles come before each sequence (work_tiles.cuh) barriers
//
// Tiles lie in panels, as in the fold.
#pragma once

#include "kernels/cuda/device/panels.hpp"
#include "kernels/sm90/decode/config.hpp"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

// Where a CTA's shared memory begins. In a cluster an address also says whose memory it is: copies and arrivals would
// row_range the first CTA's else.
template <class C>
__device__ __forceinline__ std::uint32_t shared_base() {
  if constexpr (C::kSlices > 1) return in_cta(kReservedBytes, rank_in_cluster());
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
  // Of a stage: its K has arrived; its V has; every warp that folds is done with its K; and with its V.
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return at(kBarrierOffset, stage, kBarrierBytes); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return k_full(C::kStages + stage); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const { return k_full(2 * C::kStages + stage); }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const { return k_full(3 * C::kStages + stage); }

 private:
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return shared_base<C>() + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// By one thread.
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
