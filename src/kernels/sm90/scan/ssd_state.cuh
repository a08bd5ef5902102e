// SPDX-License-Identifier: Apache-2.0
// Local states of segments (kernels/ssm.hpp, 1): a CTA folds a segment for up to three dim_blocks of heads of one
// group, a warpgroup each. The state lies in its registers, [64 dims, states], and is what products of wgmma add to.
// One more warpgroup fetches B, once for all of them, and x, and makes what x is weighed with, a warp each dim_block.
#pragma once

#include "kernels/sm90/scan/ssd_dim_block.cuh"

namespace ringattn::sm90 {

// B of every chunk, and C where there are outputs, by one warpgroup, whose last warp asks for them; what the copy
// engine can't read, the whole of it copies. The whole of it also calls feed(chunk) of each chunk and, once it is past
// the chunk that lies kBy ahead, work(chunk).
template <int kBy, int kStates, bool kOutputs, class Feed, class Work>
__device__ __forceinline__ void fetch_chunks(const HopperSsd& p, const SsdMemory<kStates, kOutputs>& memory,
                                             const SsdChunks& chunks_of_cta, Feed feed, Work work) {
  using Layout = SsdLayout<kStates, kOutputs>;
  constexpr int kPanels = kStates / 64;
  const int group = chunks_of_cta.block.group;
  const int chunks = chunks_of_cta.chunks();
  const bool asks = warp_of_warpgroup() == kWarpgroup / 32 - 1;
  PackedPipelineState<Layout::kStages> ring;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks + kBy; ++chunk, ring.advance()) {
    if (chunk < chunks) feed(chunk);
    // In front of what may have to wait for the dim_blocks: they wait for it.
    if (chunk >= kBy) work(chunk - kBy);
    if (chunk >= chunks) continue;
    const std::uint32_t stage = ring.stage();
    const std::uint32_t full = memory.full(stage);
    const bool whole = chunks_of_cta.whole(chunk);
    const bool fetched_b = p.maps_b && whole;
    const bool fetched_c = kOutputs && p.maps_c && whole;
    const bool copies = !fetched_b || (kOutputs && !fetched_c);
    if (!copies && !asks) continue;
    // By one warp: another one may be q_stages ahead or behind, and the barrier doesn't tell of which round it
    // is_leader.
    if (asks) barrier_wait(memory.empty(stage), ring.parity() ^ 1U);
    if (copies) {
      named_sync(kDimBlockFetchBarrier, kWarpgroup);  // the stage is empty
      if (!fetched_b) {
        copy_panels<kPanels>(p.scan.b, chunks_of_cta.row(chunk), group, 0, chunks_of_cta.tokens(chunk),
                             memory.b(stage));
      }
      if (kOutputs && !fetched_c) {
        copy_panels<kPanels>(p.scan.c, chunks_of_cta.row(chunk), group, 0, chunks_of_cta.tokens(chunk),
                             memory.c(stage));
      }
      proxy_fence();
      named_sync(kDimBlockFetchBarrier, kWarpgroup);  // all have copied
      if (!asks) continue;
    }
    if (thread_of_warpgroup() % 32 == 0) {
      const int row = static_cast<int>(chunks_of_cta.row(chunk));
      barrier_arrive_expect(full, (fetched_b ? Layout::kTileBytes : 0) + (fetched_c ? Layout::kTileBytes : 0));
      if (fetched_b) tma_load_box(memory.b(stage), &p.b, full, 0, group, row);
      if (fetched_c) tma_load_box(memory.c(stage), &p.c, full, 0, group, row);
    }
    __syncwarp();
  }
}

// What a state that a warpgroup has in registers is in memory: calls visit(pair of elements, offset).
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

// What x of a chunk is weighed with, by pairs of tokens: hi parts, lo parts; and the chunk's decay. By a lane of a warp
// each of 32 pairs.
inline constexpr int kBehindDecay = kChunk * 4;
__device__ __forceinline__ void make_behind(const float* da_cumsum, int pair, unsigned char* behind) {
  const float2 intra_chunk_scores = intra_chunk_offset(da_cumsum, pair);
  uint2 parts;
  cuda::split_hi_lo(intra_chunk_scores.x, intra_chunk_scores.y, parts.x, parts.y);
  reinterpret_cast<uint2*>(behind)[pair] = parts;
  if (pair == 0) *reinterpret_cast<float*>(behind + kBehindDecay) = decay_of_chunk(da_cumsum);
}

// x of tokens [16 k, 16 k + 16), weighed, as two parts of the left operand.
__device__ __forceinline__ void weigh_x(const std::uint32_t (&x)[4], const unsigned char* behind, int k,
                                        std::uint32_t (&weighed)[2][4]) {
  const uint2* const pairs = reinterpret_cast<const uint2*>(behind) + thread_of_cta() % 4 + 8 * k;
  const uint2 first = pairs[0];
  const uint2 second = pairs[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) cuda::split_product_hi_lo(x[r], r < 2 ? first : second, weighed[0][r], weighed[1][r]);
}

// By the warpgroup that fetches, a warp each dim_block: its x and da_cumsum, and what follows from da_cumsum.
template <int kStates>
class DimBlockInputs {
 public:
  __device__ __forceinline__ DimBlockInputs(const HopperSsd& params, const SsdMemory<kStates, false>& shared,
                                            const SsdChunks& where)
      : memory_(shared), count_(where.block.count), dim_block_(params, shared, where, warp_of_warpgroup()) {}

  __device__ __forceinline__ void fetch(int chunk) const {
    if (dim_block_.slot >= count_) return;
    if (thread_of_warpgroup() % 32 == 0) {
      barrier_wait(memory_.x_empty(dim_block_.slot, Band::input_of(chunk)), Band::parity(chunk) ^ 1U);
      dim_block_.fetch(chunk);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void weigh(int chunk) const {
    if (dim_block_.slot >= count_) return;
    const int input = Band::input_of(chunk);
    const int lane = thread_of_warpgroup() % 32;
    barrier_wait(memory_.x_full(dim_block_.slot, input), Band::parity(chunk));
    make_behind(memory_.da_cumsum(dim_block_.slot, input), lane, memory_.behind(dim_block_.slot, input));
    __syncwarp();
    if (lane == 0) barrier_arrive(memory_.behind_full(dim_block_.slot, input));
  }

 private:
  using Band = SsdDimBlock<kStates, false>;

  const SsdMemory<kStates, false>& memory_;
  const int count_;
  const Band dim_block_;
};

template <int kStates>
__device__ __forceinline__ void accumulate_dim_block(const HopperSsd& p, const SsdMemory<kStates, false>& memory,
                                                     const SsdChunks& chunks_of_cta, int slot) {
  using Layout = SsdLayout<kStates, false>;
  const SsdDimBlock<kStates, false> dim_block(p, memory, chunks_of_cta, slot);
  const int chunks = chunks_of_cta.chunks();
  const std::uint32_t matrices = dim_block.matrices_of_lane();
  const bool first_of_warp = thread_of_warpgroup() % 32 == 0;
  float state[kStates / 8][4] = {};
  PackedPipelineState<Layout::kStages> ring;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
    const int input = dim_block.input_of(chunk);
    barrier_wait(memory.behind_full(slot, input), dim_block.parity(chunk));
    dim_block.await(chunk);
    if (!dim_block.fetched(chunk)) dim_block.sync();
    const unsigned char* const behind = memory.behind(slot, input);
    std::uint32_t weighed[4][2][4];
    const std::uint32_t x = memory.x(slot, input) + matrices;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t raw[4];
      cuda::load_matrix_transposed(raw, x + static_cast<std::uint32_t>(k) * dim_block.kStepRowBytes);
      weigh_x(raw, behind, k, weighed[k]);
    }
    const float decay = *reinterpret_cast<const float*>(behind + kBehindDecay);
#pragma unroll
    for (int t = 0; t < kStates / 8; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[t][e] = __fmul_rn(decay, state[t][e]);
    }
    const std::uint32_t stage = ring.stage();
    barrier_wait(memory.full(stage), ring.parity());
    pin(state);
    accumulate_tokens<kStates, 0, 4, 2>(state, weighed, memory.b(stage));
    if (first_of_warp) barrier_arrive(memory.x_empty(slot, input));
    wgmma_wait<0>();
    pin(state);
    if (first_of_warp) barrier_arrive(memory.empty(stage));
  }
  float* const target = p.scan.states + chunks_of_cta.segment.index * dim_block.all_states() + dim_block.state_offset();
  visit_state<kStates>(state, [&](float first, float second, int offset) {
    *reinterpret_cast<float2*>(target + offset) = make_float2(first, second);
  });
}

template <int kStates>
__global__ void __launch_bounds__(kSsdThreads, 1) ssd_state_kernel(const __grid_constant__ HopperSsd p) {
  extern __shared__ unsigned char ssd_shared[];
  const SsdMemory<kStates, false> memory(ssd_shared);
  const SsdChunks chunks_of_cta(p);
  if (threadIdx.x == 0) memory.init_barriers(chunks_of_cta.block.count);
  __syncthreads();
  const int warpgroup = static_cast<int>(of_warp(threadIdx.x / kWarpgroup));
  if (warpgroup == kDimBlocksPerCta) {
    reg_dealloc<kSsdFetchRegisters>();
    const DimBlockInputs<kStates> inputs(p, memory, chunks_of_cta);
    // Steps are read long before others take their chunks_of_cta.
    constexpr int kBy = 2;
    static_assert(kBy < SsdLayout<kStates, false>::kInputs);
    fetch_chunks<kBy>(
        p, memory, chunks_of_cta, [&](int chunk) { inputs.fetch(chunk); }, [&](int chunk) { inputs.weigh(chunk); });
  } else {
    reg_alloc<kSsdDimBlockRegisters>();
    if (warpgroup < chunks_of_cta.block.count) accumulate_dim_block<kStates>(p, memory, chunks_of_cta, warpgroup);
  }
}

}  // namespace ringattn::sm90
