// SPDX-License-Identifier: Apache-2.0
// Rows of o (kernels/gated_delta/gated_delta.hpp, 3). Chunk by chunk from the state before the segment, transposed:
//
//   u = T β (v − exp2(G) (k · S))       o = scale exp2(G) (q · S) + scores · u
//   S ← exp2(G_last) S + kᵀ (u · exp2(G_last − G))
//
// The products with q overlap the conversion of those with k, and the epilogue of o overlaps the update of S.
#pragma once

#include "kernels/gated_delta/sm90/delta_pipeline.cuh"

namespace ringattn::sm90 {

// Named barriers of the consumers. Barrier 0 is that of the CTA.
inline constexpr int kDeltaRowBarrier = 1;

// Stores 64 columns of o through the warpgroup's panel of v. Each warp writes its own columns of the panel, whose
// values it has read.
__device__ __forceinline__ void store_output_rows(const DeltaParams& p, const DeltaSquare& o, std::uint32_t panel,
                                                  std::int64_t row, int tokens, int head, int consumer) {
  const std::uint32_t matrices = column_matrices(panel);
#pragma unroll
  for (int k = 0; k < kDeltaChunk / 16; ++k) {
    std::uint32_t packed[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) packed[r] = pack_bf16(o[2 * k + r / 2][r % 2 * 2], o[2 * k + r / 2][r % 2 * 2 + 1]);
    store_matrix_transposed(matrices + static_cast<std::uint32_t>(k) * kRowStepBytes, packed);
  }
  named_sync(kDeltaRowBarrier + consumer, kWarpgroup);
  const int vector = thread_of_warpgroup() % 8;  // of eight columns
  auto* const target = static_cast<std::uint16_t*>(p.o) + row * p.o_token_stride + head * p.o_head_stride +
                       consumer * cuda::kPanelColumns + vector * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = 16 * i + thread_of_warpgroup() / 8;
    if (token >= tokens) continue;
    const uint4 elements = cuda::load_shared_16(panel + cuda::swizzled(token, vector));
    std::uint16_t* const to = target + token * p.o_token_stride;
    if (p.o_aligned) {
      // A plain assignment compiles to four stores here (nvcc 13.0).
      __stcs(reinterpret_cast<uint4*>(to), elements);
    } else {
      cuda::store_elements(to, elements, false);
    }
  }
}

template <class Element, bool kKeyDecays>
__device__ __forceinline__ void compute_rows(const DeltaParams& p, const DeltaMemory<true, kKeyDecays>& memory,
                                             const DeltaSegment& segment, int head, int consumer) {
  using Layout = DeltaLayout<true, kKeyDecays>;
  const int chunks = segment.chunks();
  const bool first_of_warp = thread_of_warpgroup() % 32 == 0;
  DeltaState state = {};
  if (!segment.from_zero) {
    visit_pairs(state, consumer,
                [states = p.states + delta_state_offset(p, segment, head)](float& first, float& second, int at) {
                  const float2 pair = *reinterpret_cast<const float2*>(states + at);
                  first = pair.x;
                  second = pair.y;
                });
  }
  PackedPipelineState<Layout::kStages> ring;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
    const std::uint32_t stage = ring.stage();
    const std::uint32_t base = memory.stage(stage);
    const std::uint32_t values = base + Layout::kValues + static_cast<std::uint32_t>(consumer * kDeltaSquareBytes);
    const std::uint32_t factors = base + Layout::kFactors;
    StateOperand before;
    DeltaSquare products;
    DeltaSquare o;
    TokenOperand u;
    round_operand(before, state);
    barrier_wait(memory.full(stage), ring.parity());
    multiply_state<Element>(products, before, base + Layout::kKeys);
    multiply_state<Element>(o, before, base + Layout::kQueries);
    wgmma_wait<1>();
    pin(products);
    subtract_products<true, !kKeyDecays>(u, products, values, factors + DeltaFactors::kKeyDecay);
    multiply_square<Element>(products, u, factors + DeltaFactors::kInverse, true);
    decay_state<kKeyDecays>(state, factors);
    wgmma_wait<1>();
    pin(o);
    if constexpr (!kKeyDecays) {
#pragma unroll
      for (int n = 0; n < kDeltaChunk / 8; ++n) {
        const float2 decay = adjacent_pair(factors + DeltaFactors::kQueryDecay, n);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] = __fmul_rn(o[n][e], e % 2 == 0 ? decay.x : decay.y);
      }
    }
    wgmma_wait<0>();
    pin(products);
    round_operand(u, products);
    multiply_square<Element>(o, u, base + Layout::kScores, false);
    if constexpr (kKeyDecays) {
      update_state<Element>(state, u, base + Layout::kUpdateKeys);
    } else {
      TokenOperand decayed;
      round_scaled(decayed, products, factors + DeltaFactors::kStateDecay);
      update_state<Element>(state, decayed, base + Layout::kUpdateKeys);
    }
    wgmma_wait<1>();
    pin(o);
    store_output_rows(p, o, values, segment.row + std::int64_t{chunk} * kDeltaChunk, segment.tokens_of(chunk), head,
                      consumer);
    wgmma_wait<0>();
    pin(state);
    __syncwarp();  // all lanes have read o
    if (first_of_warp) barrier_arrive(memory.empty(stage));
  }
}

template <class Element, bool kKeyDecays>
__global__ void __launch_bounds__(kDeltaThreads, 1) delta_output_kernel(const __grid_constant__ DeltaParams p) {
  extern __shared__ unsigned char delta_dynamic[];
  const DeltaMemory<true, kKeyDecays> memory(delta_dynamic);
  const int head = p.first_head + static_cast<int>(blockIdx.x) % p.head_count;
  const DeltaSegment segment = delta_segment(p, static_cast<int>(blockIdx.x) / p.head_count);
  if (threadIdx.x == 0) memory.init_barriers();
  __syncthreads();
  const int warpgroup = static_cast<int>(warp_uniform(threadIdx.x / kWarpgroup));
  if (warpgroup == 0) {
    reg_dealloc<DeltaLayout<true, kKeyDecays>::kProducerRegisters>();
    load_delta_chunks<true, kKeyDecays>(p, memory, segment, head);
  } else {
    reg_alloc<DeltaLayout<true, kKeyDecays>::kConsumerRegisters>();
    compute_rows<Element, kKeyDecays>(p, memory, segment, head, warpgroup - 1);
  }
}

}  // namespace ringattn::sm90
