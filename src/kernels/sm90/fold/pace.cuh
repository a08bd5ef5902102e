// SPDX-License-Identifier: Apache-2.0
// Keeps CTAs close to each other. Those that fold one KV head read the same keys; as long as they do so at about the
// same time, the L2 cache reads them from memory once for all. Left alone they drift apart over a long walk, and the
// reads of memory then take the power that the tensor cores could use (bench/NOTES.md). Nothing but time hangs on this:
// who stands still is waited for a little, then no more.
#pragma once

#include "kernels/sm90/fold/shared_map.cuh"

namespace ringattn::sm90 {

inline constexpr int kPaceTiles = 256;  // a CTA may be ahead of the last one
inline constexpr int kPaceReads = 5;    // of 32 CTAs each: more than a device of this kind has
inline constexpr int kPaceTries = 2000;
inline constexpr unsigned kPaceNanoseconds = 1000;

// One warp's, all lanes together.
class Pace {
 public:
  __device__ __forceinline__ explicit Pace(const cuda::FoldParams& p) : done_by_(p.schedule.tiles_done) {
    ask();
    const int least = least_of_all();
    done_ = least == kLeft ? 1 : least;
    publish(done_);
  }
  // Before the next `tiles`.
  __device__ __forceinline__ void go(int tiles) {
    if (!keeps_) return;
    done_ += tiles;
    publish(done_);
    for (int i = 0; done_ - least_of_all() > kPaceTiles; ++i) {
      if (i == kPaceTries) {
        leave();
        keeps_ = false;
        return;
      }
      __nanosleep(kPaceNanoseconds);
      ask();
    }
    ask();  // the answers are there when they are needed
  }
  __device__ __forceinline__ void leave() {
    if (keeps_) publish(kLeft);
  }

 private:
  static constexpr int kLeft = 0x7FFFFFFF;

  __device__ __forceinline__ void publish(int done) const {
    if (threadIdx.x % 32 == 0) {
      asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(done_by_ + blockIdx.x), "r"(done) : "memory");
    }
  }
  __device__ __forceinline__ void ask() {
#pragma unroll
    for (unsigned i = 0; i < kPaceReads; ++i) {
      const unsigned cta = threadIdx.x % 32 + 32 * i;
      seen_[i] = 0;
      if (cta < gridDim.x) {
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(seen_[i]) : "l"(done_by_ + cta) : "memory");
      }
    }
  }
  // Of the CTAs at work.
  __device__ __forceinline__ int least_of_all() const {
    int least = kLeft;
#pragma unroll
    for (int i = 0; i < kPaceReads; ++i) least = seen_[i] > 0 && seen_[i] < least ? seen_[i] : least;
    return __reduce_min_sync(0xffffffffU, least);
  }

  std::int32_t* done_by_;  // tiles, of each CTA; 0: not begun
  bool keeps_ = true;
  int done_ = 0;
  int seen_[kPaceReads] = {};
};

// The pace warp's work.
template <class C>
__device__ __forceinline__ void keep_pace(const cuda::FoldParams& p, const SharedMap<C>& map) {
  Pace pace(p);
  for (std::uint32_t parity = 0;; parity ^= 1U) {
    barrier_wait(map.pace_told(), parity);
    const int tiles = load_number(map.pace());
    if (tiles < 0) break;
    pace.go(tiles);
    barrier_arrive(map.pace_free());
  }
  pace.leave();
}

}  // namespace ringattn::sm90
