// SPDX-License-Identifier: Apache-2.0
// Aligned dynamic shared memory. `__align__` of the dynamic shared array does not suffice: with --Ofast-compile, ptxas
// lets the array begin directly after the kernel's static shared memory. A kernel therefore rounds the address up, and
// its launch requests the bytes that are lost.
#pragma once

#ifdef __CUDACC__
#include <cstdint>

#include "kernels/common/cuda/ptx.cuh"
#endif

namespace ringattn::cuda {

// Bytes to request at launch, so that `bytes` remain after aligned_shared<alignment>().
constexpr int aligned_shared_bytes(int bytes, int alignment) { return bytes + alignment; }

#ifdef __CUDACC__
// The first aligned byte of the dynamic shared array `dynamic`, as a pointer and as a shared-memory address.
template <int kAlignment>
__device__ __forceinline__ unsigned char* aligned_shared(unsigned char* dynamic) {
  static_assert(kAlignment > 0 && (kAlignment & (kAlignment - 1)) == 0);
  return dynamic + (-shared_address(dynamic) & (std::uint32_t{kAlignment} - 1));
}
template <int kAlignment>
__device__ __forceinline__ std::uint32_t aligned_shared_address(const unsigned char* dynamic) {
  static_assert(kAlignment > 0 && (kAlignment & (kAlignment - 1)) == 0);
  return (shared_address(dynamic) + std::uint32_t{kAlignment} - 1) & ~(std::uint32_t{kAlignment} - 1);
}
#endif

}  // namespace ringattn::cuda
