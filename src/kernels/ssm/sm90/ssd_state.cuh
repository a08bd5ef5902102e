// SPDX-License-Identifier: Apache-2.0
// Computes the local state of each segment (step 1 in kernels/ssm/ssm.hpp). A CTA processes a segment for up to three
// dim blocks, each 64 dims of a head. Their heads are in one group, so that they share B. One consumer warpgroup per
// dim block holds its state [64 dims, state_dim] in registers, as the wgmma accumulator. One more warpgroup is the
// producer: its last warp loads B for all dim blocks. Each other warp loads x of one dim block and computes the scales
// of x.
#pragma once

#include "kernels/ssm/sm90/ssd_dim_block.cuh"

namespace ringattn::sm90 {

// Main loop of the producer warpgroup: loads B, and with kOutputs also C. Its last warp issues the TMA loads. What TMA
// cannot load is copied by the whole warpgroup. All warps call issue(chunk) for each chunk, and compute(chunk) kDelay
// chunks later.
template <int kDelay, int kStates, bool kOutputs, class Issue, class Compute>
__device__ __forceinline__ void load_chunks(const HopperSsd& p, const SsdMemory<kStates, kOutputs>& memory,
                                            const SsdChunks& cta_chunks, Issue issue, Compute compute) {
  using Layout = SsdLayout<kStates, kOutputs>;
  constexpr int kPanels = kStates / 64;
  const int group = cta_chunks.block.group;
  const int chunks = cta_chunks.chunks();
  const bool issues_tma = warp_of_warpgroup() == kWarpgroup / 32 - 1;
  PackedPipelineState<Layout::kStages> ring;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks + kDelay; ++chunk, ring.advance()) {
    if (chunk < chunks) issue(chunk);
    // Before the wait for an empty stage, because the dim blocks need the results before they can release a stage.
    if (chunk >= kDelay) compute(chunk - kDelay);
    if (chunk >= chunks) continue;
    const std::uint32_t stage = ring.stage();
    const std::uint32_t full = memory.full(stage);
    const bool whole = cta_chunks.whole(chunk);
    const bool tma_b = p.maps_b && whole;
    const bool tma_c = kOutputs && p.maps_c && whole;
    const bool needs_copy = !tma_b || (kOutputs && !tma_c);
    if (!needs_copy && !issues_tma) continue;
    // Only one warp waits. Another warp may be a full round of the pipeline ahead or behind, where the parity is the
    // same again.
    if (issues_tma) barrier_wait(memory.empty(stage), ring.parity() ^ 1U);
    if (needs_copy) {
      named_sync(kProducerBarrier, kWarpgroup);  // now all warps know that the stage is empty
      if (!tma_b) {
        copy_panels<kPanels>(p.scan.b, cta_chunks.row(chunk), group, 0, cta_chunks.tokens(chunk), memory.b(stage));
      }
      if (kOutputs && !tma_c) {
        copy_panels<kPanels>(p.scan.c, cta_chunks.row(chunk), group, 0, cta_chunks.tokens(chunk), memory.c(stage));
      }
      proxy_fence();
      named_sync(kProducerBarrier, kWarpgroup);  // all threads have copied
      if (!issues_tma) continue;
    }
    if (thread_of_warpgroup() % 32 == 0) {
      const int row = static_cast<int>(cta_chunks.row(chunk));
      barrier_arrive_expect(full, (tma_b ? Layout::kTileBytes : 0) + (tma_c ? Layout::kTileBytes : 0));
      if (tma_b) tma_load_box(memory.b(stage), &p.b, full, 0, group, row);
      if (tma_c) tma_load_box(memory.c(stage), &p.c, full, 0, group, row);
    }
    __syncwarp();
  }
}

// Calls visit(first, second, offset) for each pair of adjacent elements of a state in registers. `offset` is theirs in
// the state in memory, from this thread's first element.
template <int kStates, class Visit>
__device__ __forceinline__ void visit_state(float (&state)[kStates / 8][4], Visit visit) {
#pragma unroll
  for (int t = 0; t < kStates / 8; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visit(state[t][2 * half], state[t][2 * half + 1], half * 8 * kStates + t * 8);
    }
  }
}

// Offset in bytes of the chunk's decay, after the scales of x.
inline constexpr int kChunkDecayOffset = kChunk * 4;
// Computes the scales of x for a pair of tokens, as hi/lo pairs, and for pair 0 the chunk's decay. Each lane of a warp
// computes one pair. `reversed`: scales of g in the gradient of the state before the chunk.
__device__ __forceinline__ void compute_state_scale(const float* da_cumsum, int pair, bool reversed,
                                                    unsigned char* state_scale) {
  const float2 sums = reinterpret_cast<const float2*>(da_cumsum)[pair];
  const float2 scales =
      reversed ? make_float2(cuda::exp2_approx(sums.x), cuda::exp2_approx(sums.y)) : state_scale_pair(da_cumsum, pair);
  uint2 hi_lo;
  cuda::split_hi_lo(scales.x, scales.y, hi_lo.x, hi_lo.y);
  reinterpret_cast<uint2*>(state_scale)[pair] = hi_lo;
  if (pair == 0) *reinterpret_cast<float*>(state_scale + kChunkDecayOffset) = decay_of_chunk(da_cumsum);
}

// Computes a fragment of x · scale for tokens [16 k, 16 k + 16), as a hi/lo pair.
__device__ __forceinline__ void scale_x(const std::uint32_t (&x)[4], const unsigned char* state_scale, int k,
                                        std::uint32_t (&scaled_x)[2][4]) {
  const uint2* const pairs = reinterpret_cast<const uint2*>(state_scale) + thread_of_cta() % 4 + 8 * k;
  const uint2 first = pairs[0];
  const uint2 second = pairs[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) cuda::split_product_hi_lo(x[r], r < 2 ? first : second, scaled_x[0][r], scaled_x[1][r]);
}

// Loads x and dA_cumsum of the dim blocks and computes their state scales. Each warp of the producer warpgroup does so
// for one dim block.
template <int kStates>
class DimBlockInputs {
 public:
  __device__ __forceinline__ DimBlockInputs(const HopperSsd& params, const SsdMemory<kStates, false>& memory,
                                            const SsdChunks& cta_chunks)
      : memory_(memory),
        count_(cta_chunks.block.count),
        reversed_(cta_chunks.reversed),
        dim_block_(params, memory, cta_chunks, warp_of_warpgroup()) {}

  __device__ __forceinline__ void issue_loads(int chunk) const {
    if (dim_block_.index >= count_) return;
    if (thread_of_warpgroup() % 32 == 0) {
      barrier_wait(memory_.x_empty(dim_block_.index, DimBlock::input_stage(chunk)), DimBlock::parity(chunk) ^ 1U);
      dim_block_.issue_loads(chunk);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void compute_scales(int chunk) const {
    if (dim_block_.index >= count_) return;
    const int input = DimBlock::input_stage(chunk);
    const int lane = thread_of_warpgroup() % 32;
    barrier_wait(memory_.x_full(dim_block_.index, input), DimBlock::parity(chunk));
    compute_state_scale(memory_.da_cumsum(dim_block_.index, input), lane, reversed_,
                        memory_.state_scale(dim_block_.index, input));
    __syncwarp();
    if (lane == 0) barrier_arrive(memory_.state_scale_full(dim_block_.index, input));
  }

 private:
  using DimBlock = SsdDimBlock<kStates, false>;

  const SsdMemory<kStates, false>& memory_;
  const int count_;
  const bool reversed_;
  const DimBlock dim_block_;
};

// x of a chunk is what is in its tile.
struct GivenX {
  __device__ __forceinline__ void await(int /*chunk*/) const {}
  __device__ __forceinline__ void transform(std::uint32_t (&/*x*/)[4], int /*chunk*/, int /*k*/) const {}
  __device__ __forceinline__ void release(int /*chunk*/) const {}
};

// A consumer warpgroup: computes the state of one dim block chunk by chunk, S ← decay · S + (x · scale)ᵀ B. Calls
// visit(chunk) before each chunk. `of_x` is GivenX or has the same functions: await() before x is read, transform() of
// each fragment, of 16 tokens, and release() before the tile of x is released.
template <int kStates, class Visit, class X = GivenX>
__device__ __forceinline__ void accumulate_dim_block(float (&state)[kStates / 8][4],
                                                     const SsdDimBlock<kStates, false>& dim_block, Visit visit,
                                                     const X& of_x = {}) {
  using Layout = SsdLayout<kStates, false>;
  const SsdMemory<kStates, false>& memory = dim_block.memory;
  const int index = dim_block.index;
  const int chunks = dim_block.cta_chunks.chunks();
  const std::uint32_t matrices = dim_block.matrices_of_lane();
  const bool first_of_warp = thread_of_warpgroup() % 32 == 0;
  PackedPipelineState<Layout::kStages> ring;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
    visit(chunk);
    const int input = dim_block.input_stage(chunk);
    barrier_wait(memory.state_scale_full(index, input), dim_block.parity(chunk));
    dim_block.await(chunk);
    of_x.await(chunk);
    if (!dim_block.uses_tma(chunk)) dim_block.sync();
    const unsigned char* const state_scale = memory.state_scale(index, input);
    std::uint32_t scaled_x[4][2][4];
    const std::uint32_t x = memory.x(index, input) + matrices;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t raw[4];
      cuda::load_matrix_transposed(raw, x + static_cast<std::uint32_t>(k) * dim_block.kStepRowBytes);
      of_x.transform(raw, chunk, k);
      scale_x(raw, state_scale, k, scaled_x[k]);
    }
    const float decay = *reinterpret_cast<const float*>(state_scale + kChunkDecayOffset);
#pragma unroll
    for (int t = 0; t < kStates / 8; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[t][e] = __fmul_rn(decay, state[t][e]);
    }
    const std::uint32_t stage = ring.stage();
    barrier_wait(memory.full(stage), ring.parity());
    pin(state);
    accumulate_tokens<kStates, 0, 4, 2>(state, scaled_x, memory.b(stage));
    of_x.release(chunk);
    if (first_of_warp) barrier_arrive(memory.x_empty(index, input));
    wgmma_wait<0>();
    pin(state);
    if (first_of_warp) barrier_arrive(memory.empty(stage));
  }
}

// Accumulates the local state of one dim block, and stores it.
template <int kStates, class X = GivenX>
__device__ __forceinline__ void accumulate_local_state(const SsdDimBlock<kStates, false>& dim_block,
                                                       const X& of_x = {}) {
  float state[kStates / 8][4] = {};
  accumulate_dim_block<kStates>(
      state, dim_block, [](int) {}, of_x);
  float* const target =
      dim_block.p.scan.states + dim_block.cta_chunks.segment.index * dim_block.all_states() + dim_block.state_offset();
  visit_state<kStates>(state, [&](float first, float second, int offset) {
    *reinterpret_cast<float2*>(target + offset) = make_float2(first, second);
  });
}

template <int kStates>
__global__ void __launch_bounds__(kSsdThreads, 1) ssd_state_kernel(const __grid_constant__ HopperSsd p) {
  extern __shared__ unsigned char ssd_shared[];
  const SsdMemory<kStates, false> memory(ssd_shared);
  const SsdChunks cta_chunks(p);
  if (threadIdx.x == 0) memory.init_barriers(cta_chunks.block.count);
  __syncthreads();
  const int warpgroup = static_cast<int>(warp_uniform(threadIdx.x / kWarpgroup));
  if (warpgroup == kDimBlocksPerCta) {
    reg_dealloc<kSsdProducerRegisters>();
    const DimBlockInputs<kStates> inputs(p, memory, cta_chunks);
    // Scales are computed two chunks after the loads of dA_cumsum are issued.
    constexpr int kDelay = 2;
    static_assert(kDelay < SsdLayout<kStates, false>::kInputStages);
    load_chunks<kDelay>(
        p, memory, cta_chunks, [&](int chunk) { inputs.issue_loads(chunk); },
        [&](int chunk) { inputs.compute_scales(chunk); });
  } else {
    reg_alloc<kSsdDimBlockRegisters>();
    if (warpgroup < cta_chunks.block.count) accumulate_local_state<kStates>({p, memory, cta_chunks, warpgroup});
  }
}

}  // namespace ringattn::sm90
