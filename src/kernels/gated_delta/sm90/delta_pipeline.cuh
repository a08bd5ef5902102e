// SPDX-License-Identifier: Apache-2.0
// Code shared by delta_state_kernel and delta_output_kernel. A CTA processes a segment of one value head. Its producer
// warpgroup loads the chunks. Each of two consumer warpgroups computes 64 columns of v, all transposed: its state Sᵀ
// [64 columns, 128 dims] stays in registers as a wgmma accumulator, whose layout, rounded, is also that of the operand
// A of the next product. So neither the state nor u passes through shared memory, and the warpgroups need not wait for
// each other.
#pragma once

#include "kernels/common/sm90/matrix.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/warpgroup_gemm.cuh"
#include "kernels/gated_delta/sm90/delta_segment.cuh"

namespace ringattn::sm90 {

// Addresses in a CTA's shared memory.
template <bool kOutputs, bool kKeyDecays>
class DeltaMemory {
 public:
  using Layout = DeltaLayout<kOutputs, kKeyDecays>;

  __device__ __forceinline__ explicit DeltaMemory(unsigned char* dynamic)
      : base_(cuda::aligned_shared_address<1024>(dynamic)) {}

  __device__ __forceinline__ std::uint32_t stage(std::uint32_t stage) const {
    return base_ + stage * Layout::kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t full(std::uint32_t stage) const {
    return base_ + Layout::kBarriers + stage * kBarrierBytes;
  }
  __device__ __forceinline__ std::uint32_t empty(std::uint32_t stage) const {
    return full(stage) + Layout::kStages * kBarrierBytes;
  }
  // By one thread. Full: the producer's threads, after their copies, and the bulk copies. Empty: the consumers' warps.
  __device__ __forceinline__ void init_barriers() const {
    for (std::uint32_t stage = 0; stage < Layout::kStages; ++stage) {
      barrier_init(full(stage), kWarpgroup + 1);
      barrier_init(empty(stage), 2 * kWarpgroup / 32);
    }
    barrier_init_fence();
  }

 private:
  std::uint32_t base_;
};

// The producer warpgroup. Rows are copied by cp.async, which takes rows of any stride and stops at a segment's end.
// With more than two stages a chunk's copies are awaited one chunk later, so that two chunks are in flight.
template <bool kOutputs, bool kKeyDecays>
__device__ __forceinline__ void load_delta_chunks(const DeltaParams& p, const DeltaMemory<kOutputs, kKeyDecays>& memory,
                                                  const DeltaSegment& segment, int head) {
  using Layout = DeltaLayout<kOutputs, kKeyDecays>;
  constexpr int kDelay = Layout::kStages > 2 ? 1 : 0;
  const int key_head = head / p.heads_per_key;
  const int chunks = segment.chunks();
  const std::int64_t first_chunk = delta_chunk_index(p, segment, head, 0);
  PackedPipelineState<Layout::kStages> ring;
  std::uint32_t previous = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks + kDelay; ++chunk) {
    const std::uint32_t stage = ring.stage();
    if (chunk < chunks) {
      const std::uint32_t base = memory.stage(stage);
      const std::int64_t row = segment.row + std::int64_t{chunk} * kDeltaChunk;
      const int tokens = segment.tokens_of(chunk);
      const auto copy = [&](int offset, const DeltaTensor& tensor, int of_head) {
        cuda::copy_tile<kDeltaChunk, kDeltaDim, kWarpgroup>(base + static_cast<std::uint32_t>(offset),
                                                            delta_rows(tensor, row, of_head), 0, tokens);
      };
      barrier_wait(memory.empty(stage), ring.parity() ^ 1U);
      if (threadIdx.x == 0) {
        const std::uint32_t full = memory.full(stage);
        const std::int64_t index = first_chunk + chunk;
        barrier_arrive_expect(full, Layout::kBulkBytes);
        tma_load_bytes(base + Layout::kFactors, p.factors + index * DeltaFactors::kBytes, DeltaFactors::kBytes, full);
        if constexpr (kOutputs) {
          tma_load_bytes(base + Layout::kScores, p.scores + index * kDeltaSquareBytes, kDeltaSquareBytes, full);
        }
        if constexpr (kKeyDecays) {
          const unsigned char* const tiles = p.decayed + index * DeltaDecayed::kBytes;
          tma_load_bytes(base + Layout::kKeys, tiles + DeltaDecayed::kKeys, kDeltaTileBytes, full);
          tma_load_bytes(base + Layout::kUpdateKeys, tiles + DeltaDecayed::kUpdateKeys, kDeltaTileBytes, full);
          if constexpr (kOutputs) {
            tma_load_bytes(base + Layout::kQueries, tiles + DeltaDecayed::kQueries, kDeltaTileBytes, full);
          }
        }
      }
      if constexpr (!kKeyDecays) {
        copy(Layout::kKeys, p.k, key_head);
        if constexpr (kOutputs) copy(Layout::kQueries, p.q, key_head);
      }
      copy(Layout::kValues, p.v, head);
      cuda::copy_commit();
    }
    if (chunk >= kDelay) {
      if (chunk < chunks) {
        cuda::copy_wait<kDelay>();
      } else {
        cuda::copy_wait<0>();
      }
      proxy_fence();
      barrier_arrive(memory.full(kDelay == 0 ? stage : previous));
    }
    previous = stage;
    ring.advance();
  }
}

using DeltaState = float[kDeltaDim / 8][4];     // Sᵀ [64, 128]
using DeltaSquare = float[kDeltaChunk / 8][4];  // [64, 64 tokens]
using StateOperand = std::uint32_t[kDeltaDim / 16][4];
using TokenOperand = std::uint32_t[kDeltaChunk / 16][4];

// Rounds an accumulator to an operand A.
template <int kSteps>
__device__ __forceinline__ void round_operand(std::uint32_t (&a)[kSteps][4], const float (&d)[2 * kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int r = 0; r < 4; ++r) a[k][r] = pack_bf16(d[2 * k + r / 2][r % 2 * 2], d[2 * k + r / 2][r % 2 * 2 + 1]);
  }
}

// The elements of a vector over the columns of an accumulator that belong to element pair [n] of a thread.
__device__ __forceinline__ float2 adjacent_pair(std::uint32_t vector, int n) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(vector + static_cast<std::uint32_t>(8 * n + thread_of_cta() % 4 * 2) * 4));
  return pair;
}

// Rounds an accumulator whose columns are tokens, times a factor for each token, to an operand A.
__device__ __forceinline__ void round_scaled(TokenOperand& a, const DeltaSquare& d, std::uint32_t factors) {
#pragma unroll
  for (int n = 0; n < kDeltaChunk / 8; ++n) {
    const float2 factor = adjacent_pair(factors, n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[n / 2][n % 2 * 2 + half] =
          pack_bf16(__fmul_rn(d[n][2 * half], factor.x), __fmul_rn(d[n][2 * half + 1], factor.y));
    }
  }
}

// Address, in the panel of a warpgroup's columns of v or o, of this lane's row of the matrices of the warp's 16
// columns.
__device__ __forceinline__ std::uint32_t column_matrices(std::uint32_t panel) {
  const int lane = thread_of_warpgroup() % 32;
  return panel + cuda::swizzled(lane / 16 * 8 + lane % 8, thread_of_warpgroup() / 32 * 2 + lane / 8 % 2);
}

// vᵀ − (k · S)ᵀ · decay, rounded. `products` are (k · S)ᵀ. With kValues false v is zero, with kDecays false the keys
// have their decays.
template <bool kValues, bool kDecays>
__device__ __forceinline__ void subtract_products(TokenOperand& y, const DeltaSquare& products, std::uint32_t panel,
                                                  std::uint32_t key_decay) {
  const std::uint32_t matrices = column_matrices(panel);
#pragma unroll
  for (int k = 0; k < kDeltaChunk / 16; ++k) {
    std::uint32_t values[4] = {};
    if constexpr (kValues) {
      cuda::load_matrix_transposed(values, matrices + static_cast<std::uint32_t>(k) * kRowStepBytes);
    }
#pragma unroll
    for (int n = 2 * k; n < 2 * k + 2; ++n) {
      float2 decay = {1.0F, 1.0F};
      if constexpr (kDecays) decay = adjacent_pair(key_decay, n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = n % 2 * 2 + half;
        const float2 value = unpack_bf16(values[r]);
        y[k][r] = pack_bf16(__fmaf_rn(-decay.x, products[n][2 * half], value.x),
                            __fmaf_rn(-decay.y, products[n][2 * half + 1], value.y));
      }
    }
  }
}

// Issues products += a · bᵀ for a panel b [64 tokens, 64], or = where `from_zero`.
template <class Element>
__device__ __forceinline__ void multiply_square(DeltaSquare& products, const TokenOperand& a, std::uint32_t panel,
                                                bool from_zero) {
  const std::uint32_t b = warp_uniform(descriptor_low(panel));
  pin(products);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDeltaChunk / kGemmStep; ++step) {
    Wgmma<Element, kDeltaChunk>::rk(products, a[step],
                                    descriptor(b + static_cast<std::uint32_t>(step * kStepBytes >> kDescriptorShift)),
                                    step > 0 || !from_zero);
  }
  wgmma_commit();
}

// Issues products = Sᵀ · xᵀ for a tile x [64 tokens, 128 dims] of k or q.
template <class Element>
__device__ __forceinline__ void multiply_state(DeltaSquare& products, const StateOperand& state, std::uint32_t tile) {
  multiply_transposed<Element, kDeltaDim, kDeltaChunk, kDeltaChunk>(products, state, tile);
}

// Issues Sᵀ += uᵀ · k.
template <class Element>
__device__ __forceinline__ void update_state(DeltaState& state, const TokenOperand& u, std::uint32_t keys) {
  multiply_add<Element, kDeltaDim, kDeltaChunk / 16, kDeltaChunk>(state, u, keys, false);
}

__device__ __forceinline__ float shared_number(std::uint32_t address) {
  return __int_as_float(cuda::load_shared_number(address));
}

// S ← exp2(G_last) S, where G_last has one number or, with kKeyDecays, one for each key dim.
template <bool kKeyDecays>
__device__ __forceinline__ void decay_state(DeltaState& state, std::uint32_t factors) {
  float2 decay;
  if constexpr (!kKeyDecays) decay.x = decay.y = shared_number(factors + DeltaFactors::kChunkDecay);
#pragma unroll
  for (int t = 0; t < kDeltaDim / 8; ++t) {
    if constexpr (kKeyDecays) decay = adjacent_pair(factors + DeltaFactors::kDimDecay, t);
#pragma unroll
    for (int e = 0; e < 4; ++e) state[t][e] = __fmul_rn(e % 2 == 0 ? decay.x : decay.y, state[t][e]);
  }
}

// Calls visit(first, second, offset) for each pair of adjacent elements of a warpgroup's state. `offset` is theirs in
// [value_dim, key_dim]. `consumer` is 0 or 1.
template <class Visit>
__device__ __forceinline__ void visit_pairs(DeltaState& state, int consumer, Visit visit) {
  const int first = (consumer * 64 + tile_row_of_thread()) * kDeltaDim + thread_of_cta() % 4 * 2;
#pragma unroll
  for (int t = 0; t < kDeltaDim / 8; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visit(state[t][2 * half], state[t][2 * half + 1], first + half * 8 * kDeltaDim + t * 8);
    }
  }
}

}  // namespace ringattn::sm90
