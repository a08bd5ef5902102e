// SPDX-License-Identifier: Apache-2.0
// Kernels that follow each other in a stream overlap: a kernel's CTAs come while those of the one before still run, set
// their barriers up, and wait. PTX ISA, "griddepcontrol", which GPUs from sm_90 on have; what the host says for it
// stands in pdl_launch.hpp. Code for older GPUs does nothing here, and is launched in order.
#pragma once

namespace ringattn::cuda {

// The kernel behind this one in the stream, where it was launched for it, may begin once all CTAs have said so.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the kernels before this one in the stream are done and what they have written is seen. Whoever reads or writes
// global memory has waited here, or comes behind a launch that has and lets it begin (units.cuh). What has been read by
// the cache of read-only data (__ldg) might be old behind it.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ringattn::cuda
