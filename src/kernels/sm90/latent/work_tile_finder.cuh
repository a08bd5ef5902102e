// SPDX-License-Identifier: Apache-2.0
// Finds a step's work_tiles by one warp and without a table (decode/work_tiles.cuh): a lane counts the work_tiles of
// some sequences that rescale_to each other.
#pragma once

#include "kernels/sm90/decode/work_tiles.cuh"
#include "kernels/sm90/latent/config.hpp"

namespace ringattn::sm90 {

template <class C>
class WorkTileFinder {
 public:
  __device__ __forceinline__ explicit WorkTileFinder(const DecodeParams& p)
      : p_(p), lane_(thread_of_cta() % 32), each_((p.sequences + 31) / 32) {}

  // Returns how many work_tiles there are.
  __device__ __forceinline__ int count() {
    int own = 0;
#pragma unroll 1
    for (int i = 0; i < each_; ++i) own += work_tiles_of(lane_ * each_ + i);
    own_ = own;
    before_ = before(own);
    return __shfl_sync(0xffffffffU, before_ + own, 31);
  }
  __device__ __forceinline__ DecodeWorkTile find(int number) const {
    // The last lane with no more work_tiles before it, and of its sequences, of which each lane takes one, the same.
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
  // What the lanes before this one have.
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
  const int each_;  // sequences of a lane
  int own_ = 0;     // their work_tiles
  int before_ = 0;  // work_tiles before them
};

}  // namespace ringattn::sm90
