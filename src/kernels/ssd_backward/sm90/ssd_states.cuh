// SPDX-License-Identifier: Apache-2.0
// States of segments, and gradients of states, on Hopper: the states kernel of sm90_ssd (ssm/sm90/ssd_state.cuh) in
// both directions. With kExpand it starts from the state before the segment, or the gradient after it, and stores that
// of each chunk, rounded to bf16.
#pragma once

#include "kernels/ssd_backward/cuda/ssd_backward_device.cuh"
#include "kernels/ssd_backward/sm90/ssd_rows.hpp"
#include "kernels/ssm/sm90/ssd_state.cuh"

namespace ringattn::sm90 {

struct HopperSsdStates {
  HopperSsd ssd;
  std::int32_t first_segment;  // of the launch
  Bf16* chunk_states;          // SsdStatesParams::chunk_states
};
static_assert(sizeof(HopperSsdStates) <= 4096, "kernel arguments are at most 4 KiB");

// Loads the state before the segment, or the gradient after it.
template <int kStates>
__device__ __forceinline__ void load_state(float (&state)[kStates / 8][4],
                                           const SsdDimBlock<kStates, false>& dim_block) {
  const cuda::SegmentCoord& segment = dim_block.cta_chunks.segment;
  const SsmParams& s = dim_block.p.scan;
  const std::int64_t offset_of_block = dim_block.state_offset();
  const float* const local =
      segment.first_of_super ? nullptr : s.states + segment.index * dim_block.all_states() + offset_of_block;
  const float* const before =
      segment.from_zero ? nullptr : s.super_states + segment.super_segment * dim_block.all_states() + offset_of_block;
  const float log = segment.first_of_super ? 0.0F : s.logs_before[segment.index * s.heads + dim_block.head];
  const float decay = cuda::exp2_approx(log);
  visit_state<kStates>(state, [&](float& first, float& second, int offset) {
    const float2 m = cuda::state_pair(local, offset);
    const float2 t = cuda::state_pair(before, offset);
    first = __fmaf_rn(decay, t.x, m.x);
    second = __fmaf_rn(decay, t.y, m.y);
  });
}

template <int kStates, bool kReversed, bool kExpand>
__global__ void __launch_bounds__(kSsdThreads, 1) ssd_states_kernel(const __grid_constant__ HopperSsdStates p) {
  extern __shared__ unsigned char ssd_shared[];
  const SsdMemory<kStates, false> memory(ssd_shared);
  const DimBlockCta cta_work = dim_block_cta(p.ssd.scan, p.ssd.blocks, static_cast<int>(blockIdx.x));
  SsdChunks cta_chunks(p.ssd.scan, cta_work, p.first_segment, kReversed);
  if (kReversed) cta_chunks.segment = cuda::gradient_coord(p.ssd.scan, p.first_segment + cta_work.segment);
  if (threadIdx.x == 0) memory.init_barriers(cta_chunks.block.count);
  __syncthreads();
  const int warpgroup = static_cast<int>(warp_uniform(threadIdx.x / kWarpgroup));
  if (warpgroup == kDimBlocksPerCta) {
    reg_dealloc<kSsdProducerRegisters>();
    const DimBlockInputs<kStates> inputs(p.ssd, memory, cta_chunks);
    constexpr int kDelay = 2;  // as in ssd_state_kernel
    load_chunks<kDelay>(
        p.ssd, memory, cta_chunks, [&](int chunk) { inputs.issue_loads(chunk); },
        [&](int chunk) { inputs.compute_scales(chunk); });
    return;
  }
  reg_alloc<kSsdDimBlockRegisters>();
  if (warpgroup >= cta_chunks.block.count) return;
  const SsdDimBlock<kStates, false> dim_block(p.ssd, memory, cta_chunks, warpgroup);
  if constexpr (kExpand) {
    const SsmParams& s = p.ssd.scan;
    float state[kStates / 8][4] = {};
    load_state<kStates>(state, dim_block);
    accumulate_dim_block<kStates>(state, dim_block, [&](int chunk) {
      const std::int64_t index =
          (cta_work.segment * kChunksOfSegment + cta_chunks.at(chunk)) * s.head_count + dim_block.head - s.first_head;
      cuda::store_chunk_state<kDimBlockDims>(state, p.chunk_states + index * (kDimBlockDims * kStates),
                                             tile_row_of_thread(), thread_of_warpgroup() % 32);
    });
  } else {
    accumulate_local_state<kStates>(dim_block);
  }
}

}  // namespace ringattn::sm90
