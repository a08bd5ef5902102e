// SPDX-License-Identifier: Apache-2.0
// The pace warp keeps CTAs close to each other. CTAs that fold the same KV head read the same keys. As long as they do
// so at about the same time, a tile is read from memory once, and the others find it in the L2 cache. Left alone they
// drift apart over a long kv_loop, and reading from memory then takes power that the tensor cores could use
// (bench/notes/attention-experiments.md). No result depends on this, only time does: a CTA waits for another one a
// little while, then goes on without keeping pace.
#pragma once

#include "kernels/sm90/fold/shared_map.cuh"

namespace ringattn::sm90 {

inline constexpr int kPaceTiles = 256;                   // how far a CTA may be ahead of the slowest
inline constexpr int kPaceReads = (kMaxCtas + 31) / 32;  // a lane looks at so many CTAs
inline constexpr int kPaceTries = 2000;                  // of waiting for the slowest
inline constexpr unsigned kPaceNanoseconds = 1000;       // between them

// Where a CTA is and where the others are, in tiles. All lanes of the warp call it together.
class Pace {
 public:
  __device__ __forceinline__ explicit Pace(const cuda::AttentionParams& p) : done_by_(p.schedule.tiles_done) {
    ask();
    const int least = min_of_all();
    done_ = least == kLeft ? 1 : least;
    publish(done_);
  }
  // Returns when the CTA may fetch its next `tiles` tiles.
  __device__ __forceinline__ void go(int tiles) {
    if (!keeps_) return;
    done_ += tiles;
    publish(done_);
    for (int i = 0; done_ - min_of_all() > kPaceTiles; ++i) {
      if (i == kPaceTries) {
        leave();
        keeps_ = false;
        return;
      }
      __nanosleep(kPaceNanoseconds);
      ask();
    }
    ask();  // the answers arrive while the tiles are fetched, and are looked at the next time
  }
  // Nobody waits for this CTA any more.
  __device__ __forceinline__ void leave() {
    if (keeps_) publish(kLeft);
  }

 private:
  static constexpr int kLeft = 0x7FFFFFFF;  // instead of a number of tiles: has left

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
  // Where the slowest of the CTAs is that have begun and not left; kLeft where there is none.
  __device__ __forceinline__ int min_of_all() const {
    int least = kLeft;
#pragma unroll
    for (int i = 0; i < kPaceReads; ++i) least = seen_[i] > 0 && seen_[i] < least ? seen_[i] : least;
    return __reduce_min_sync(0xffffffffU, least);
  }

  std::int32_t* done_by_;  // [CTAs]: tiles that each has begun, at least 1 as soon as it takes part; 0: not yet
  bool keeps_ = true;
  int done_ = 0;
  int seen_[kPaceReads] = {};
};

// The pace warp's work: the producer says how many tiles it wants to fetch, and waits until it may.
template <class C>
__device__ __forceinline__ void keep_pace(const cuda::AttentionParams& p, const SharedMap<C>& map) {
  Pace pace(p);
  for (std::uint32_t parity = 0;; parity ^= 1U) {
    barrier_wait(map.pace_requested(), parity);
    const int tiles = load_number(map.pace_tiles());
    if (tiles == kNoMoreWork) break;
    pace.go(tiles);
    barrier_arrive(map.pace_free());
  }
  pace.leave();
}

}  // namespace ringattn::sm90
