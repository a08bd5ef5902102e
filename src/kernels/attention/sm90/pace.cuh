// SPDX-License-Identifier: Apache-2.0
// The pace warp keeps CTAs close together in their KV loops. CTAs that attend to the same KV head read the same keys.
// While they do so at about the same time, a tile is read from HBM once and hits in L2 for the others. Without pacing
// the CTAs drift apart in a long KV loop, and the extra HBM reads take power that the tensor cores could use
// (bench/notes/attention-experiments.md). Pacing changes no result: a CTA that has waited kPaceTries times for another
// stops pacing.
#pragma once

#include "kernels/attention/sm90/shared_map.cuh"

namespace ringattn::sm90 {

inline constexpr int kPaceTiles = 256;                   // how many tiles a CTA may be ahead of the slowest
inline constexpr int kPaceReads = (kMaxCtas + 31) / 32;  // CTAs that each lane polls
inline constexpr int kPaceTries = 2000;                  // polls of the slowest CTA
inline constexpr unsigned kPaceNanoseconds = 1000;       // between polls

// Progress of this CTA and of the others, in tiles. Whole warps call it.
class Pace {
 public:
  __device__ __forceinline__ explicit Pace(const cuda::AttentionParams& p) : progress_(p.schedule.tiles_done) {
    poll();
    const int min_done = min_of_all();
    done_ = min_done == kRetired ? 1 : min_done;
    publish(done_);
  }
  // Returns when the CTA may load its next `tiles` tiles.
  __device__ __forceinline__ void wait_for_slowest(int tiles) {
    if (!keeps_pace_) return;
    done_ += tiles;
    publish(done_);
    for (int i = 0; done_ - min_of_all() > kPaceTiles; ++i) {
      if (i == kPaceTries) {
        retire();
        keeps_pace_ = false;
        return;
      }
      __nanosleep(kPaceNanoseconds);
      poll();
    }
    poll();  // these loads return while the tiles are being fetched; the next call uses them
  }
  // Other CTAs no longer wait for this one.
  __device__ __forceinline__ void retire() {
    if (keeps_pace_) publish(kRetired);
  }

 private:
  static constexpr int kRetired = 0x7FFFFFFF;  // progress of a CTA that no longer takes part

  __device__ __forceinline__ void publish(int done) const {
    if (threadIdx.x % 32 == 0) {
      asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(progress_ + blockIdx.x), "r"(done) : "memory");
    }
  }
  __device__ __forceinline__ void poll() {
#pragma unroll
    for (unsigned i = 0; i < kPaceReads; ++i) {
      const unsigned cta = threadIdx.x % 32 + 32 * i;
      seen_[i] = 0;
      if (cta < gridDim.x) {
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(seen_[i]) : "l"(progress_ + cta) : "memory");
      }
    }
  }
  // Progress of the slowest CTA that has started and still takes part; kRetired if there is none.
  __device__ __forceinline__ int min_of_all() const {
    int min_done = kRetired;
#pragma unroll
    for (int i = 0; i < kPaceReads; ++i) min_done = seen_[i] > 0 && seen_[i] < min_done ? seen_[i] : min_done;
    return __reduce_min_sync(0xffffffffU, min_done);
  }

  std::int32_t* progress_;  // [CTAs]: tiles that each CTA has started, at least 1 from its start on; 0: not started
  bool keeps_pace_ = true;
  int done_ = 0;
  int seen_[kPaceReads] = {};
};

// Main loop of the pace warp: the producer posts how many tiles it will load and waits until it may.
template <class C>
__device__ __forceinline__ void keep_pace(const cuda::AttentionParams& p, const SharedMap<C>& map) {
  Pace pace(p);
  for (std::uint32_t parity = 0;; parity ^= 1U) {
    barrier_wait(map.pace_requested(), parity);
    const int tiles = load_number(map.pace_tiles());
    if (tiles == kNoMoreWork) break;
    pace.wait_for_slowest(tiles);
    barrier_arrive(map.pace_free());
  }
  pace.retire();
}

}  // namespace ringattn::sm90
