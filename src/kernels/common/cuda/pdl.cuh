// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PDL): a kernel's CTAs may start, set up their barriers and wait while the previous
// kernel in the stream still runs. PTX ISA, "griddepcontrol", from sm_90 on. The host's side is pdl_launch.hpp. On
// older GPUs these functions do nothing, and kernels are launched in order.
#pragma once

namespace ringattn::cuda {

// Lets the next kernel in the stream start, if it was launched with PDL, once all CTAs have called this.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the previous kernels in the stream are done and their writes are visible. A thread that accesses global
// memory has called this, or runs in a kernel whose predecessor called it before pdl_launch_dependents()
// (decode/sm90/decode_common.cuh). Data that the read-only cache (__ldg) fetched may be stale after the wait.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ringattn::cuda
