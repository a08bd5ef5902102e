// SPDX-License-Identifier: Apache-2.0
// Steps that follow each other in a stream overlap: a step's CTAs come while those of the step before still run, set
// their barriers up, and wait. PTX ISA, "griddepcontrol"; what the host says for it stands in overlapping_launch.hpp.
#pragma once

namespace ringattn::sm90 {

// The kernel behind this one in the stream, where it was launched for it, may begin once all CTAs have said so.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

// Until the kernels before this one in the stream are done and what they have written is seen. Whoever reads or writes
// global memory has waited here, or comes behind a launch that has and lets it begin (units.cuh). What has been read by
// the cache of read-only data (__ldg) might be old behind it.
__device__ __forceinline__ void await_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace ringattn::sm90
