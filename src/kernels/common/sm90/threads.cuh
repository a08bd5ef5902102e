// SPDX-License-Identifier: Apache-2.0
// Thread indices, named barriers, and setmaxnreg wrappers.
#pragma once

#include <cstdint>

#include "kernels/common/cuda/ptx.cuh"

namespace ringattn::sm90 {

using cuda::named_arrive;
using cuda::named_sync;
using cuda::thread_of_cta;

inline constexpr int kWarpgroup = 128;  // threads

__device__ __forceinline__ int thread_of_warpgroup() { return thread_of_cta() & (kWarpgroup - 1); }
// The first of the two rows, out of the warpgroup's 64, that this thread's accumulators belong to. The second is 8 rows
// below it.
__device__ __forceinline__ int tile_row_of_thread() {
  const int thread = thread_of_warpgroup();
  return thread / 32 * 16 + thread % 32 / 4;
}

// Broadcasts lane 0's value, so that the compiler knows that it is warp-uniform. Values derived from it, such as
// descriptors, are then computed in uniform registers.
__device__ __forceinline__ std::uint32_t warp_uniform(std::uint32_t number) {
  return __shfl_sync(0xffffffffU, number, 0);
}

// True in one lane of a converged warp. The compiler makes a loop over lanes around an instruction that only one lane
// may issue, such as a TMA copy, unless it sees that a single lane reaches it.
__device__ __forceinline__ bool elect_one() {
  std::uint32_t is_one;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}"
      : "=r"(is_one));
  return is_one != 0;
}

// Keeps the compiler from recomputing a value: it stays in a register.
template <class Number>
__device__ __forceinline__ void keep(Number& number) {
  asm volatile("" : "+r"(number));
}

// Named barrier with an OR reduction: returns whether `mine` holds for any of the `threads`.
__device__ __forceinline__ bool named_any(int barrier, int threads, bool mine) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred one, all;\n"
      "setp.ne.s32 one, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, one;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<int>(mine))
      : "memory");
  return any != 0;
}
// setmaxnreg: every warp of the warpgroup executes it. kCount is a multiple of 8.
template <int kCount>
__device__ __forceinline__ void reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
// Decreases or increases the register count from kBefore to kCount.
template <int kCount, int kBefore>
__device__ __forceinline__ void change_registers() {
  if constexpr (kCount < kBefore) {
    reg_dealloc<kCount>();
  } else {
    reg_alloc<kCount>();
  }
}

}  // namespace ringattn::sm90
