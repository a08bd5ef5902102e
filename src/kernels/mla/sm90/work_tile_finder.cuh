// SPDX-License-Identifier: Apache-2.0
// Finds the work tiles of a step by one warp and without a table in shared memory (decode/work_tiles.cuh). Each lane
// counts the work tiles of consecutive sequences.
#pragma once

#include "kernels/decode/sm90/work_tiles.cuh"
#include "kernels/mla/sm90/config.hpp"

namespace ringattn::sm90 {

template <class C>
class WorkTileFinder {
 public:
  __device__ __forceinline__ explicit WorkTileFinder(const DecodeParams& p)
      : p_(p), lane_(thread_of_cta() % 32), each_((p.sequences + 31) / 32) {}

  // Returns the number of work tiles.
  __device__ __forceinline__ int count() {
    int own = 0;
#pragma unroll 1
    for (int i = 0; i < each_; ++i) own += work_tiles_of(lane_ * each_ + i);
    own_ = own;
    before_ = before(own);
    return __shfl_sync(0xffffffffU, before_ + own, 31);
  }
  __device__ __forceinline__ DecodeWorkTile find(int number) const {
    // Finds the last lane with at most `number` work tiles before it. Then the lanes split its sequences and search
    // again.
    const int lane = __popc(__ballot_sync(0xffffffffU, before_ <= number)) - 1;
    const int sequences_before = __shfl_sync(0xffffffffU, before_, lane);
    static_assert(kMaxMlaSequences <= 32 * 32);
    const int of_lane = __shfl_sync(0xffffffffU, own_, lane);
    const int own = lane_ >= each_ ? 0 : each_ == 1 ? of_lane : work_tiles_of(lane * each_ + lane_);
    const int first = sequences_before + before(own);
    const int nth = __popc(__ballot_sync(0xffffffffU, lane_ < each_ && first <= number)) - 1;
    return work_tile_in<C>(p_, lane * each_ + nth, __shfl_sync(0xffffffffU, first, nth), number);
  }

 private:
  __device__ __forceinline__ int work_tiles_of(int sequence) const {
    if (sequence >= p_.sequences) return 0;
    return sequence_of<C>(p_, sequence).splits * p_.attention.kv_heads * p_.blocks;
  }
  // Exclusive prefix sum over the lanes.
  __device__ __forceinline__ int before(int own) const {
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffU, sum, step);
      if (lane_ >= step) sum += other;
    }
    return sum - own;
  }

  const DecodeParams& p_;
  const int lane_;
  const int each_;  // sequences per lane
  int own_ = 0;     // work tiles of the lane's sequences
  int before_ = 0;  // work tiles of earlier lanes
};

}  // namespace ringattn::sm90
