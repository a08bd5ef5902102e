// SPDX-License-Identifier: Apache-2.0
// Threads' places, named barriers among warps, and registers moved from one warpgroup to another.
#pragma once

#include <cstdint>

namespace ringattn::sm90 {

inline constexpr int kWarpgroup = 128;  // threads

// The thread's index, read anew wherever it is asked for: what hangs on it is then not kept in registers over the main
// loop, which has none to spare.
__device__ __forceinline__ int thread_of_cta() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ int thread_of_warpgroup() { return thread_of_cta() & (kWarpgroup - 1); }
// The first of the warpgroup's rows, of 64, that the thread has a share of; the other one is 8 behind.
__device__ __forceinline__ int tile_row_of_thread() {
  const int thread = thread_of_warpgroup();
  return thread / 32 * 16 + thread % 32 / 4;
}

// Tells the compiler that all lanes have the same number. What follows from it, descriptors above all, is then worked
// out once a warp, in uniform registers.
__device__ __forceinline__ std::uint32_t of_warp(std::uint32_t number) { return __shfl_sync(0xffffffffU, number, 0); }

// Holds in one lane of a warp whose lanes are all here. Of an instruction that only one lane can have, as those to the
// copy engine, the compiler makes a loop over lanes where it does not see that it is one.
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

// Has the compiler keep a number in a register instead of working it out anew.
template <class Number>
__device__ __forceinline__ void keep(Number& number) {
  asm volatile("" : "+r"(number));
}

// Barrier 0 is __syncthreads()'s.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Arrives for others, and goes on.
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Whether `mine` holds for any of the `threads` that meet here.
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
// Every warp of a warpgroup says so; kCount is a multiple of 8.
template <int kCount>
__device__ __forceinline__ void reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
// Whichever of both it takes, of threads that have kBefore.
template <int kCount, int kBefore>
__device__ __forceinline__ void change_registers() {
  if constexpr (kCount < kBefore) {
    reg_dealloc<kCount>();
  } else {
    reg_alloc<kCount>();
  }
}

}  // namespace ringattn::sm90
