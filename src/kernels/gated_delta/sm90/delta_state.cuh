// SPDX-License-Identifier: Apache-2.0
// M and U of segments (kernels/gated_delta/gated_delta.hpp, 1). Chunk by chunk, transposed:
//
//   u = T β (v − exp2(G) (k · S))       S ← exp2(G_last) S + kᵀ (u · exp2(G_last − G))
//
// With key_decays, keys come with their decays (delta_key_factors.cuh): one tile for each of the two products.
// A consumer warpgroup computes 64 columns of U and, where M is needed, the same columns of M. These are two
// independent chains of products. The warpgroup advances one after the other, each one's update overlaps the beginning
// of the other's step, and the second warpgroup has the tensor cores in the meantime. To interleave them further takes
// more registers than there are.
#pragma once

#include "kernels/gated_delta/sm90/delta_pipeline.cuh"

namespace ringattn::sm90 {

// Advances a state by a chunk, and leaves the last product in flight. `values` is the warpgroup's panel of v. kValues
// is false for M, whose values are zero. All products that were in flight are complete when `landed` is called.
template <class Element, bool kKeyDecays, bool kValues, class Landed>
__device__ __forceinline__ void advance_state(DeltaState& state, std::uint32_t stage, std::uint32_t values,
                                              Landed landed) {
  using Layout = DeltaLayout<false, kKeyDecays>;
  const std::uint32_t factors = stage + Layout::kFactors;
  StateOperand before;
  DeltaSquare products;
  TokenOperand u;
  round_operand(before, state);
  multiply_state<Element>(products, before, stage + Layout::kKeys);
  wgmma_wait<0>();
  pin(products);
  landed();
  subtract_products<kValues, !kKeyDecays>(u, products, values, factors + DeltaFactors::kKeyDecay);
  multiply_square<Element>(products, u, factors + DeltaFactors::kInverse, true);
  decay_state<kKeyDecays>(state, factors);
  wgmma_wait<0>();
  pin(products);
  if constexpr (kKeyDecays) {
    round_operand(u, products);
  } else {
    round_scaled(u, products, factors + DeltaFactors::kStateDecay);
  }
  update_state<Element>(state, u, stage + Layout::kUpdateKeys);
}

template <class Element, bool kKeyDecays, bool kTransition>
__device__ __forceinline__ void accumulate_segment(const DeltaParams& p, const DeltaMemory<false, kKeyDecays>& memory,
                                                   const DeltaSegment& segment, int head, int consumer) {
  using Layout = DeltaLayout<false, kKeyDecays>;
  const int chunks = segment.chunks();
  const bool first_of_warp = thread_of_warpgroup() % 32 == 0;
  DeltaState u = {};
  DeltaState m;
  if constexpr (kTransition) {
    visit_pairs(m, consumer, [](float& first, float& second, int offset) {
      const int column = offset / kDeltaDim;
      const int dim = offset % kDeltaDim;
      first = dim == column ? 1.0F : 0.0F;
      second = dim + 1 == column ? 1.0F : 0.0F;
    });
  }
  PackedPipelineState<Layout::kStages> ring;
  std::uint32_t previous = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
    const std::uint32_t stage = ring.stage();
    const std::uint32_t base = memory.stage(stage);
    const std::uint32_t values = base + Layout::kValues + static_cast<std::uint32_t>(consumer * kDeltaSquareBytes);
    barrier_wait(memory.full(stage), ring.parity());
    advance_state<Element, kKeyDecays, true>(u, base, values, [&] {
      if constexpr (kTransition) pin(m);
      if (chunk > 0 && first_of_warp) barrier_arrive(memory.empty(previous));
    });
    if constexpr (kTransition) {
      advance_state<Element, kKeyDecays, false>(m, base, values, [&] { pin(u); });
    } else {
      wgmma_wait<0>();
      pin(u);
    }
    previous = stage;
  }
  const std::int64_t offset = delta_state_offset(p, segment, head);
  visit_pairs(u, consumer, [states = p.states + offset](float first, float second, int at) {
    *reinterpret_cast<float2*>(states + at) = make_float2(first, second);
  });
  if constexpr (kTransition) {
    wgmma_wait<0>();
    pin(m);
    visit_pairs(m, consumer, [transitions = p.transitions + offset](float first, float second, int at) {
      *reinterpret_cast<float2*>(transitions + at) = make_float2(first, second);
    });
  }
}

template <class Element, bool kKeyDecays>
__global__ void __launch_bounds__(kDeltaThreads, 1) delta_state_kernel(const __grid_constant__ DeltaParams p) {
  extern __shared__ unsigned char delta_dynamic[];
  const DeltaMemory<false, kKeyDecays> memory(delta_dynamic);
  const int head = p.first_head + static_cast<int>(blockIdx.x) % p.head_count;
  const DeltaSegment segment = delta_segment(p, static_cast<int>(blockIdx.x) / p.head_count);
  if (!segment.needs_state) return;
  if (threadIdx.x == 0) memory.init_barriers();
  __syncthreads();
  const int warpgroup = static_cast<int>(warp_uniform(threadIdx.x / kWarpgroup));
  if (warpgroup == 0) {
    reg_dealloc<DeltaLayout<false, kKeyDecays>::kProducerRegisters>();
    load_delta_chunks<false, kKeyDecays>(p, memory, segment, head);
  } else {
    reg_alloc<DeltaLayout<false, kKeyDecays>::kConsumerRegisters>();
    if (segment.needs_transition) {
      accumulate_segment<Element, kKeyDecays, true>(p, memory, segment, head, warpgroup - 1);
    } else {
      accumulate_segment<Element, kKeyDecays, false>(p, memory, segment, head, warpgroup - 1);
    }
  }
}

}  // namespace ringattn::sm90
