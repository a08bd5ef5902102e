// SPDX-License-Identifier: Apache-2.0
// Keeps CTAs close to each other. Those that fold one KV head read the same keys; as long as they do so at about the
// same time, the L2 cache reads them once for all. Left alone they drift apart, and a head's keys no longer fit there.
// Nothing but time hangs on this: who can't keep up, or hasn't begun, is waited for a little, then no more.
#pragma once

#include "kernels/cuda/fold_params.hpp"

namespace ringattn::sm90 {

inline constexpr int kPaceTries = 64;
inline constexpr unsigned kPaceNanoseconds = 2000;

// One warp's, all lanes together.
class Pace {
 public:
  __device__ explicit Pace(const cuda::FoldParams& p) : tiles_done_(p.paces), window_(p.pace_tiles) {
    if (window_ == 0) return;
    const int least = least_of_all();
    done_ = least == kLeft ? 1 : least;
    publish(done_);
  }
  // Before the next `tiles`.
  __device__ void go(int tiles) {
    if (window_ == 0) return;
    done_ += tiles;
    publish(done_);
    for (int i = 0; done_ - least_of_all() > window_; ++i) {
      if (i == kPaceTries) {
        window_ = 0;
        publish(kLeft);
        return;
      }
      __nanosleep(kPaceNanoseconds);
    }
  }
  __device__ void leave() {
    if (window_ != 0) publish(kLeft);
  }

 private:
  static constexpr int kLeft = 0x7FFFFFFF;

  __device__ void publish(int done) const {
    if (threadIdx.x % 32 == 0) {
      asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(tiles_done_ + blockIdx.x), "r"(done) : "memory");
    }
  }
  // Of the CTAs at work.
  __device__ int least_of_all() const {
    int least = kLeft;
    for (unsigned i = threadIdx.x % 32; i < gridDim.x; i += 32) {
      int done;
      asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(tiles_done_ + i) : "memory");
      if (done > 0 && done < least) least = done;
    }
    return __reduce_min_sync(0xffffffffU, least);
  }

  std::int32_t* tiles_done_;
  int window_;  // 0: no more
  int done_ = 0;
};

}  // namespace ringattn::sm90
