// SPDX-License-Identifier: Apache-2.0
// AttentionState of y (kernels/ssm.hpp, 4): a CTA computes a segment for up to three dim_blocks of heads of one group,
// chunk by chunk, from the state in front of it. A warpgroup computes yᵀ, [64 dims, 64 tokens], of its dim_block:
//
//   yᵀ = S · Cᵀ            S from registers, where products left it; scaled by decays of tokens
//      + xᵀ · intra_chunk_scoresᵀ     x from registers, intra_chunk_scores from shared memory
//
// and then the next state. Weights of the next chunk, and the rows of this one, are made while the tensor cores add to
// the state. One more warpgroup fetches B and C, and makes what doesn't wait for the dim_blocks: C · Bᵀ, once for all
// of them, decays up to tokens, and what x is weighed with.
#pragma once

#include "kernels/sm90/ptx/wgmma_left.cuh"
#include "kernels/sm90/scan/ssd_scores.cuh"
#include "kernels/sm90/scan/ssd_state.cuh"

namespace ringattn::sm90 {

template <int kStates>
class SsdRows {
 public:
  using Layout = SsdLayout<kStates, true>;

  __device__ __forceinline__ SsdRows(const HopperSsd& params, const SsdMemory<kStates, true>& shared,
                                     const SsdChunks& where, int slot)
      : p_(params),
        memory_(shared),
        place_(where),
        dim_block_(params, shared, where, slot),
        skip_(params.scan.d != nullptr ? params.scan.d[dim_block_.head] : 0.0F) {}

  __device__ __forceinline__ void walk() {
    const int chunks = place_.chunks();
    if (first_thread()) {
      for (int chunk = 0; chunk < Layout::kInputs && chunk < chunks; ++chunk) dim_block_.fetch(chunk);
    }
    load_state();
    PackedPipelineState<Layout::kStages> ring;
    make_intra_chunk_scores(0);
    proxy_fence();
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
      const std::uint32_t stage = ring.stage();
      const int input = dim_block_.input_of(chunk);
      const std::uint32_t x_tile = memory_.x(dim_block_.slot, input) + dim_block_.matrices_of_lane();
      float y[kChunk / 8][4];
      barrier_wait(memory_.full(stage), ring.parity());
      add_state(y, memory_.c(stage), decay_of_chunk(memory_.da_cumsum(dim_block_.slot, input)));
      dim_block_.sync();  // intra_chunk_scores and x are there
      barrier_wait(memory_.behind_full(dim_block_.slot, input), dim_block_.parity(chunk));
      wgmma_wait<0>();
      pin(y);
      std::uint32_t x[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        cuda::load_matrix_transposed(x[k], x_tile + static_cast<std::uint32_t>(k) * dim_block_.kStepRowBytes);
      }
      const bool gated = p_.scan.z.data != nullptr;
      if (gated) fetch_gate(chunk, memory_.x(dim_block_.slot, input));
      scale_rows(y, input);
      add_tokens(y, x);
      std::uint32_t weighed[4][1][4];
      weigh_rounded(x[0], memory_.behind(dim_block_.slot, input), 0, weighed[0][0]);
      pin(state_);
      accumulate_tokens<kStates, 0, 1, 1>(state_, weighed, memory_.b(stage));
      wgmma_wait<1>();
      pin(y);
      if (gated) apply_gate(y, x_tile);
      store_rows(y, x_tile);
#pragma unroll
      for (int k = 1; k < 4; ++k) weigh_rounded(x[k], memory_.behind(dim_block_.slot, input), k, weighed[k][0]);
      accumulate_tokens<kStates, 1, 4, 1>(state_, weighed, memory_.b(stage));
      proxy_fence();
      dim_block_.sync();  // the rows are there, and nobody reads intra_chunk_scores, factors, x and da_cumsum any more
      write_rows(chunk, memory_.x(dim_block_.slot, input));
      if (chunk + 1 < chunks) make_intra_chunk_scores(chunk + 1);
      proxy_fence();
      if (first_thread()) {
        tma_store_wait_read();
        if (chunk + Layout::kInputs < chunks) dim_block_.fetch(chunk + Layout::kInputs);
      }
      __syncwarp();
      wgmma_wait<0>();
      pin(state_);
      if (thread_of_warpgroup() % 32 == 0) barrier_arrive(memory_.empty(stage));
    }
    if (first_thread()) tma_store_wait();
  }

 private:
  static __device__ __forceinline__ bool first_thread() { return thread_of_warpgroup() == 0; }

  // The state in front of the segment.
  __device__ __forceinline__ void load_state() {
    const cuda::SegmentCoord& segment = place_.segment;
    const SsmParams& s = p_.scan;
    const float* const local = segment.first_of_super
                                   ? nullptr
                                   : s.states + segment.index * dim_block_.all_states() + dim_block_.state_offset();
    const float* const before = segment.from_zero ? nullptr
                                                  : s.super_states + segment.super_segment * dim_block_.all_states() +
                                                        dim_block_.state_offset();
    const float log = segment.first_of_super ? 0.0F : s.logs_before[segment.index * s.heads + dim_block_.head];
    const float decay = cuda::exp2_approx(log);
    visit_state<kStates>(state_, [&](float& first, float& second, int offset) {
      const float2 m = cuda::state_pair(local, offset);
      const float2 t = cuda::state_pair(before, offset);
      first = __fmaf_rn(decay, t.x, m.x);
      second = __fmaf_rn(decay, t.y, m.y);
    });
  }

  // Weights of a chunk, once nobody reads those of the chunk before it. Other threads see them behind a barrier, and so
  // do the tensor cores.
  __device__ __forceinline__ void make_intra_chunk_scores(int chunk) {
    dim_block_.await(chunk);
    const auto buffer = static_cast<std::uint32_t>(chunk) & 1U;
    const float* const da_cumsum = memory_.da_cumsum(dim_block_.slot, dim_block_.input_of(chunk));
    barrier_wait(memory_.scores_full(buffer), static_cast<std::uint32_t>(chunk) >> 1 & 1U);
    weight_chunk(memory_.scores(buffer), da_cumsum, skip_, memory_.intra_chunk_scores(dim_block_.slot));
    __syncwarp();
    if (thread_of_warpgroup() % 32 == 0) barrier_arrive(memory_.scores_empty(buffer));
  }

  // Issues y = S · Cᵀ, 16 states at a time, while the next ones are rounded. Behind that, the state is what the fold
  // adds to: decayed by the chunk.
  __device__ __forceinline__ void add_state(float (&y)[kChunk / 8][4], std::uint32_t c_tile, float decay) {
    using Pack = cuda::Products<__nv_bfloat16>;
    const std::uint32_t c = of_warp(descriptor_low(c_tile));
    std::uint32_t rounded[kStates / 16][4];
    wgmma_wait<0>();  // nothing is under way; here ptxas (13.0) sees it, which else adds a wait between the da_cumsum
    pin(state_);
    pin(y);
#pragma unroll
    for (int k = 0; k < kStates / 16; ++k) {
      if (k >= 2) wgmma_wait<1>();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&s)[4] = state_[2 * k + half];
        rounded[k][2 * half] = Pack::pack(s[0], s[1]);
        rounded[k][2 * half + 1] = Pack::pack(s[2], s[3]);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] = __fmul_rn(decay, s[e]);
      }
      wgmma_fence();
      const auto at = static_cast<std::uint32_t>((k / 4 * kDimBlockTileBytes + k % 4 * 32) >> 4);
      multiply_left(y, rounded[k], descriptor(c + at), k > 0);
      wgmma_commit();
    }
  }

  // What rows have of the state decays up to each token.
  __device__ __forceinline__ void scale_rows(float (&y)[kChunk / 8][4], int input) const {
    const auto* const up_to = reinterpret_cast<const float4*>(memory_.up_to(dim_block_.slot, input) +
                                                              thread_of_warpgroup() % 4 * kUpToLaneFloats);
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      const float4 decays = up_to[i];
      scale_columns(y[2 * i], decays.x, decays.y);
      scale_columns(y[2 * i + 1], decays.z, decays.w);
    }
  }
  static __device__ __forceinline__ void scale_columns(float (&y)[4], float first, float second) {
    y[0] = __fmul_rn(y[0], first);
    y[1] = __fmul_rn(y[1], second);
    y[2] = __fmul_rn(y[2], first);
    y[3] = __fmul_rn(y[3], second);
  }

  // Issues yᵀ += xᵀ · intra_chunk_scoresᵀ.
  __device__ __forceinline__ void add_tokens(float (&y)[kChunk / 8][4], const std::uint32_t (&x)[4][4]) const {
    const std::uint32_t intra_chunk_scores = of_warp(descriptor_low(memory_.intra_chunk_scores(dim_block_.slot)));
    pin(y);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      multiply_left(y, x[k], descriptor(intra_chunk_scores + static_cast<std::uint32_t>(k * 32 >> 4)), true);
    }
    wgmma_commit();
  }

  // x of tokens [16 k, 16 k + 16), weighed and rounded, as left operand.
  static __device__ __forceinline__ void weigh_rounded(const std::uint32_t (&x)[4], const unsigned char* behind, int k,
                                                       std::uint32_t (&weighed)[4]) {
    const auto* const pairs = reinterpret_cast<const uint2*>(behind) + behind_word(thread_of_cta() % 4) / 2;
    const uint2 intra_chunk_scores = pairs[k];
#pragma unroll
    for (int r = 0; r < 4; ++r)
      weighed[r] = cuda::multiply_pairs(x[r], r < 2 ? intra_chunk_scores.x : intra_chunk_scores.y);
  }

  // Asks for z of the warp's dims, to where its dims of x lay: 16 bytes a copy, two of which are a whole sector.
  __device__ __forceinline__ void fetch_gate(int chunk, std::uint32_t tile) const {
    constexpr int kPieces = 16 / kPieceElements;  // of a token
    const SsmTensor& z = p_.scan.z;
    const int warp = thread_of_warpgroup() / 32;
    const int lane = thread_of_warpgroup() % 32;
    const int tokens = place_.tokens(chunk);
    const int piece = kPieces * warp + lane % kPieces;
    const auto* const gates = static_cast<const std::uint16_t*>(z.data) + place_.row(chunk) * z.token_stride +
                              dim_block_.head * z.head_stride + dim_block_.first_dim + piece * kPieceElements;
    __syncwarp();  // all lanes have x
#pragma unroll
    for (int first = 0; first < kChunk; first += 32 / kPieces) {
      const int token = first + lane / kPieces;
      const bool present = token < tokens;
      const std::uint16_t* const from = gates + (present ? token : 0) * z.token_stride;
      cuda::copy_chunk(tile + cuda::swizzled(token, piece), reinterpret_cast<const char*>(from), present, z.aligned);
    }
    cuda::copy_commit();
  }

  __device__ __forceinline__ void apply_gate(float (&y)[kChunk / 8][4], std::uint32_t matrices) const {
    cuda::copy_wait<0>();
    __syncwarp();  // what other lanes have copied is there
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t z[4];
      cuda::load_matrix_transposed(z, matrices + static_cast<std::uint32_t>(k) * dim_block_.kStepRowBytes);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float2 gate = cuda::unpack(z[r], __nv_bfloat16());
        float* const rows = y[2 * k + r / 2] + r % 2 * 2;
        rows[0] = __fmul_rn(rows[0], cuda::silu(gate.x));
        rows[1] = __fmul_rn(rows[1], cuda::silu(gate.y));
      }
    }
    __syncwarp();  // nobody reads z any more
  }

  // Rounded, to where the warp's dims of x lay.
  __device__ __forceinline__ void store_rows(const float (&y)[kChunk / 8][4], std::uint32_t tile) const {
    using Pack = cuda::Products<__nv_bfloat16>;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t packed[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float(&d)[4] = y[2 * k + r / 2];
        packed[r] = Pack::pack(d[r % 2 * 2], d[r % 2 * 2 + 1]);
      }
      store_matrix_transposed(tile + static_cast<std::uint32_t>(k) * dim_block_.kStepRowBytes, packed);
    }
  }

  // From shared memory. What the copy engine writes is under way; what threads write has been read.
  __device__ __forceinline__ void write_rows(int chunk, std::uint32_t tile) const {
    const SsmParams& s = p_.scan;
    if (p_.maps_y && place_.whole(chunk)) {
      if (first_thread()) {
        tma_store_box(&p_.y, tile, dim_block_.first_dim, dim_block_.head, static_cast<int>(place_.row(chunk)));
        tma_store_commit();
      }
      __syncwarp();
      return;
    }
    auto* const rows = static_cast<std::uint16_t*>(s.y) + place_.row(chunk) * s.y_token_stride +
                       dim_block_.head * s.y_head_stride + dim_block_.first_dim;
    constexpr int kPieces = kDimBlockDims / kPieceElements;
    const int tokens = place_.tokens(chunk);
#pragma unroll 1
    for (int i = thread_of_warpgroup(); i < kChunk * kPieces; i += kWarpgroup) {
      const int token = i / kPieces;
      if (token >= tokens) break;
      const uint4 piece = cuda::load_shared_16(tile + cuda::swizzled(token, i % kPieces));
      std::uint16_t* const target = rows + token * s.y_token_stride + i % kPieces * kPieceElements;
      if (s.y_aligned) {
        *reinterpret_cast<uint4*>(target) = piece;
        continue;
      }
      const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        target[2 * w] = static_cast<std::uint16_t>(words[w]);
        target[2 * w + 1] = static_cast<std::uint16_t>(words[w] >> 16);
      }
    }
    dim_block_.sync();
  }

  const HopperSsd& p_;
  const SsdMemory<kStates, true>& memory_;
  const SsdChunks& place_;
  const SsdDimBlock<kStates, true> dim_block_;
  const float skip_;  // D, or zero
  float state_[kStates / 8][4];
};

template <int kStates>
__global__ void __launch_bounds__(kSsdThreads, 1) ssd_finish_kernel(const __grid_constant__ HopperSsd p) {
  extern __shared__ unsigned char ssd_shared[];
  const SsdMemory<kStates, true> memory(ssd_shared);
  const SsdChunks chunks_of_cta(p);
  if (threadIdx.x == 0) memory.init_barriers(chunks_of_cta.block.count);
  // Blocks of intra_chunk_scores above the diagonal stay 0.
  constexpr int kIntraChunkPieces = kDimBlocksPerCta * kDimBlockTileBytes / 16;
  auto* const intra_chunk_scores = reinterpret_cast<uint4*>(memory.bytes + SsdLayout<kStates, true>::kIntraChunkScores);
  for (int i = static_cast<int>(threadIdx.x); i < kIntraChunkPieces; i += kSsdThreads)
    intra_chunk_scores[i] = make_uint4(0, 0, 0, 0);
  proxy_fence();
  __syncthreads();
  const int warpgroup = static_cast<int>(of_warp(threadIdx.x / kWarpgroup));
  if (warpgroup == kDimBlocksPerCta) {
    reg_dealloc<kSsdScoreRegisters>();
    const DimBlockDecays<kStates> factors(memory, chunks_of_cta.block.count);
    SharedScores<kStates> scores(memory);
    fetch_chunks<1>(
        p, memory, chunks_of_cta, [](int) {},
        [&](int chunk) {
          scores.make(chunk);
          factors.make(chunk);
        });
  } else {
    reg_alloc<kSsdRowRegisters>();
    if (warpgroup < chunks_of_cta.block.count) SsdRows<kStates>(p, memory, chunks_of_cta, warpgroup).walk();
  }
}

}  // namespace ringattn::sm90
