// SPDX-License-Identifier: Apache-2.0
// Outputs y (kernels/ssm/ssm.hpp, 4). A CTA processes a segment for up to three dim blocks of heads in one group, chunk
// by chunk, starting from the state before the segment. A warpgroup computes yᵀ [64 dims, 64 tokens] of its dim block:
//
//   yᵀ = S · Cᵀ                    S in registers, the accumulator of the state update; scaled by exp2(dA_cumsum)
//      + xᵀ · intra-chunk scoresᵀ  x in registers, scores in shared memory
//
// and then the next state. The intra-chunk scores of the next chunk and the epilogue of this one overlap the MMAs of
// the state update. One more warpgroup is the producer of B and C, and computes what does not depend on the state: C ·
// Bᵀ, shared by all dim blocks, exp2(dA_cumsum), and the scales of x in the state.
//
// With kGateGradient the gradient of the gate takes the place of y: dz = dy · (y before the gate) · silu'(z), for
// kernels/ssd_backward.
#pragma once

#include "kernels/common/sm90/wgmma_m64n64_rs.cuh"
#include "kernels/ssm/sm90/ssd_scores.cuh"
#include "kernels/ssm/sm90/ssd_state.cuh"

namespace ringattn::sm90 {

// What dz needs besides the parameters of y, in whose place it is stored.
struct SsdGateGradient {
  SsmTensor dy;
  bool wide;  // dz is fp32
};
// dy's tiles of a chunk follow the forward's shared memory.
template <int kStates>
constexpr int gate_gradient_tiles() {
  return (SsdLayout<kStates, true>::kBytes + 1023) / 1024 * 1024;
}
template <int kStates>
constexpr int gate_gradient_bytes() {
  constexpr int kBytes =
      cuda::aligned_shared_bytes(gate_gradient_tiles<kStates>() + kDimBlocksPerCta * kDimBlockTileBytes, 1024);
  static_assert(kBytes <= 227 * 1024);
  return kBytes;
}

template <int kStates, bool kGateGradient>
class SsdOutput {
 public:
  using Layout = SsdLayout<kStates, true>;

  // `gate_gradient`: null unless kGateGradient.
  __device__ __forceinline__ SsdOutput(const HopperSsd& params, const SsdMemory<kStates, true>& shared,
                                       const SsdChunks& where, int index, const SsdGateGradient* gate_gradient)
      : p_(params),
        memory_(shared),
        cta_chunks_(where),
        dim_block_(params, shared, where, index),
        gate_gradient_(gate_gradient),
        skip_(params.scan.d != nullptr ? params.scan.d[dim_block_.head] : 0.0F) {}

  __device__ __forceinline__ void run() {
    const int chunks = cta_chunks_.chunks();
    if (first_thread()) {
      for (int chunk = 0; chunk < Layout::kInputStages && chunk < chunks; ++chunk) dim_block_.issue_loads(chunk);
    }
    load_state();
    PackedPipelineState<Layout::kStages> ring;
    compute_intra_chunk_scores(0);
    proxy_fence();
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
      const std::uint32_t stage = ring.stage();
      const int input = dim_block_.input_stage(chunk);
      const std::uint32_t x_tile = memory_.x(dim_block_.index, input) + dim_block_.matrices_of_lane();
      float y[kChunk / 8][4];
      barrier_wait(memory_.full(stage), ring.parity());
      multiply_state(y, memory_.c(stage), decay_of_chunk(memory_.da_cumsum(dim_block_.index, input)));
      dim_block_.sync();  // intra-chunk scores and x are written
      barrier_wait(memory_.state_scale_full(dim_block_.index, input), dim_block_.parity(chunk));
      wgmma_wait<0>();
      pin(y);
      std::uint32_t x[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        cuda::load_matrix_transposed(x[k], x_tile + static_cast<std::uint32_t>(k) * dim_block_.kStepRowBytes);
      }
      const bool gated = kGateGradient || p_.scan.z.data != nullptr;
      if (gated) load_dims_of_warp(p_.scan.z, chunk, memory_.x(dim_block_.index, input));
      if constexpr (kGateGradient) load_dims_of_warp(gate_gradient_->dy, chunk, dy_tile());
      scale_by_decay(y, input);
      multiply_scores(y, x);
      std::uint32_t scaled_x[4][1][4];
      scale_x_rounded(x[0], memory_.state_scale(dim_block_.index, input), 0, scaled_x[0][0]);
      pin(state_);
      accumulate_tokens<kStates, 0, 1, 1>(state_, scaled_x, memory_.b(stage));
      wgmma_wait<1>();
      pin(y);
      if constexpr (kGateGradient) {
        apply_gate_gradient(y, x_tile);
      } else if (gated) {
        apply_gate(y, x_tile);
      }
      const bool wide = kGateGradient && gate_gradient_->wide;
      if (!wide) store_output_tile(y, x_tile);
#pragma unroll
      for (int k = 1; k < 4; ++k)
        scale_x_rounded(x[k], memory_.state_scale(dim_block_.index, input), k, scaled_x[k][0]);
      accumulate_tokens<kStates, 1, 4, 1>(state_, scaled_x, memory_.b(stage));
      proxy_fence();
      dim_block_.sync();  // y is written, and all reads of scores, scales, x and dA_cumsum are done
      if (wide) {
        store_wide(y, chunk);
      } else {
        store_output(chunk, memory_.x(dim_block_.index, input));
      }
      if (chunk + 1 < chunks) compute_intra_chunk_scores(chunk + 1);
      proxy_fence();
      if (first_thread()) {
        tma_store_wait_read();
        if (chunk + Layout::kInputStages < chunks) dim_block_.issue_loads(chunk + Layout::kInputStages);
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

  // Loads the state before the segment.
  __device__ __forceinline__ void load_state() {
    const cuda::SegmentCoord& segment = cta_chunks_.segment;
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

  // Computes the intra-chunk scores of a chunk, after all reads of the previous chunk's. Visible to other threads and
  // to wgmma after a proxy fence and a barrier.
  __device__ __forceinline__ void compute_intra_chunk_scores(int chunk) {
    dim_block_.await(chunk);
    const auto buffer = static_cast<std::uint32_t>(chunk) & 1U;
    const float* const da_cumsum = memory_.da_cumsum(dim_block_.index, dim_block_.input_stage(chunk));
    barrier_wait(memory_.scores_full(buffer), static_cast<std::uint32_t>(chunk) >> 1 & 1U);
    store_intra_chunk_scores(memory_.scores(buffer), da_cumsum, skip_, memory_.intra_chunk_scores(dim_block_.index));
    __syncwarp();
    if (thread_of_warpgroup() % 32 == 0) barrier_arrive(memory_.scores_empty(buffer));
  }

  // Issues y = S · Cᵀ, 16 states at a time, and rounds the next ones meanwhile. Then the state in registers is decayed
  // by the chunk, so that the state update can accumulate into it.
  __device__ __forceinline__ void multiply_state(float (&y)[kChunk / 8][4], std::uint32_t c_tile, float decay) {
    using Pack = cuda::MmaTraits<__nv_bfloat16>;
    const std::uint32_t c = warp_uniform(descriptor_low(c_tile));
    std::uint32_t rounded[kStates / 16][4];
    wgmma_wait<0>();  // no-op: shows ptxas (13.0) that no MMA is in flight, which else adds a wait to each k step
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
      wgmma_m64n64_rs(y, rounded[k], descriptor(c + at), k > 0);
      wgmma_commit();
    }
  }

  // Scales the state's contribution by the decay from the chunk's start to each token.
  __device__ __forceinline__ void scale_by_decay(float (&y)[kChunk / 8][4], int input) const {
    const auto* const prefix_decay = reinterpret_cast<const float4*>(
        memory_.prefix_decay(dim_block_.index, input) + thread_of_warpgroup() % 4 * kPrefixDecayLaneFloats);
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      const float4 decays = prefix_decay[i];
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

  // Issues yᵀ += xᵀ · intra-chunk scoresᵀ.
  __device__ __forceinline__ void multiply_scores(float (&y)[kChunk / 8][4], const std::uint32_t (&x)[4][4]) const {
    const std::uint32_t intra_chunk_scores = warp_uniform(descriptor_low(memory_.intra_chunk_scores(dim_block_.index)));
    pin(y);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_m64n64_rs(y, x[k], descriptor(intra_chunk_scores + static_cast<std::uint32_t>(k * 32 >> 4)), true);
    }
    wgmma_commit();
  }

  // A fragment of x · scale for tokens [16 k, 16 k + 16), rounded to bf16.
  static __device__ __forceinline__ void scale_x_rounded(const std::uint32_t (&x)[4], const unsigned char* state_scale,
                                                         int k, std::uint32_t (&scaled_x)[4]) {
    const auto* const pairs = reinterpret_cast<const uint2*>(state_scale) + state_scale_word(thread_of_cta() % 4) / 2;
    const uint2 scales = pairs[k];
#pragma unroll
    for (int r = 0; r < 4; ++r) scaled_x[r] = cuda::multiply_pairs(x[r], r < 2 ? scales.x : scales.y);
  }

  __device__ __forceinline__ std::uint32_t dy_tile() const {
    return memory_.base +
           static_cast<std::uint32_t>(gate_gradient_tiles<kStates>() + dim_block_.index * kDimBlockTileBytes);
  }

  // Loads the warp's dims of z into the tile of x, whose dims of this warp have been read, or of dy. Two vectors of 16
  // bytes are a full sector.
  __device__ __forceinline__ void load_dims_of_warp(const SsmTensor& tensor, int chunk, std::uint32_t tile) const {
    constexpr int kVectors = 16 / kVectorElements;  // per token
    const int warp = thread_of_warpgroup() / 32;
    const int lane = thread_of_warpgroup() % 32;
    const int tokens = cta_chunks_.tokens(chunk);
    const int vector = kVectors * warp + lane % kVectors;
    const auto* const rows = static_cast<const std::uint16_t*>(tensor.data) +
                             cta_chunks_.row(chunk) * tensor.token_stride + dim_block_.head * tensor.head_stride +
                             dim_block_.first_dim + vector * kVectorElements;
    __syncwarp();  // all lanes have read what was there
#pragma unroll
    for (int first = 0; first < kChunk; first += 32 / kVectors) {
      const int token = first + lane / kVectors;
      const bool present = token < tokens;
      const std::uint16_t* const from = rows + (present ? token : 0) * tensor.token_stride;
      cuda::copy_chunk(tile + cuda::swizzled(token, vector), reinterpret_cast<const char*>(from), present,
                       tensor.aligned);
    }
    cuda::copy_commit();
  }

  __device__ __forceinline__ void apply_gate(float (&y)[kChunk / 8][4], std::uint32_t matrices) const {
    cuda::copy_wait<0>();
    __syncwarp();  // makes the other lanes' copies visible
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
    __syncwarp();  // all lanes have read z
  }

  __device__ __forceinline__ void apply_gate_gradient(float (&y)[kChunk / 8][4], std::uint32_t matrices) const {
    const std::uint32_t dy_matrices = dy_tile() + dim_block_.matrices_of_lane();
    cuda::copy_wait<0>();
    __syncwarp();  // makes the other lanes' copies visible
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t z[4];
      std::uint32_t dy[4];
      cuda::load_matrix_transposed(z, matrices + static_cast<std::uint32_t>(k) * dim_block_.kStepRowBytes);
      cuda::load_matrix_transposed(dy, dy_matrices + static_cast<std::uint32_t>(k) * dim_block_.kStepRowBytes);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float2 gate = cuda::unpack(z[r], __nv_bfloat16());
        const float2 of_y = cuda::unpack(dy[r], __nv_bfloat16());
        float* const rows = y[2 * k + r / 2] + r % 2 * 2;
        rows[0] = __fmul_rn(__fmul_rn(of_y.x, rows[0]), cuda::silu_slope(gate.x));
        rows[1] = __fmul_rn(__fmul_rn(of_y.y, rows[1]), cuda::silu_slope(gate.y));
      }
    }
    __syncwarp();  // all lanes have read z and dy
  }

  // Stores fp32 values. Eight lanes have adjacent dims of a token, a full sector.
  __device__ __forceinline__ void store_wide(const float (&y)[kChunk / 8][4], int chunk) const {
    const SsmParams& s = p_.scan;
    auto* const rows = static_cast<float*>(s.y) + cta_chunks_.row(chunk) * s.y_token_stride +
                       dim_block_.head * s.y_head_stride + dim_block_.first_dim + tile_row_of_thread();
    const int tokens = cta_chunks_.tokens(chunk);
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = 8 * n + dim_block_.column_of_thread() + e % 2;
        if (token < tokens) rows[token * s.y_token_stride + e / 2 * 8] = y[n][e];
      }
    }
  }

  // Rounds y and stores it to the warp's dims of the tile of x.
  __device__ __forceinline__ void store_output_tile(const float (&y)[kChunk / 8][4], std::uint32_t tile) const {
    using Pack = cuda::MmaTraits<__nv_bfloat16>;
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

  // Stores y from shared to global memory. Stores by threads have read the tile on return. A TMA store may still read
  // it.
  __device__ __forceinline__ void store_output(int chunk, std::uint32_t tile) const {
    const SsmParams& s = p_.scan;
    if (p_.maps_y && cta_chunks_.whole(chunk)) {
      if (first_thread()) {
        tma_store_box(&p_.y, tile, dim_block_.first_dim, dim_block_.head, static_cast<int>(cta_chunks_.row(chunk)));
        tma_store_commit();
      }
      __syncwarp();
      return;
    }
    auto* const rows = static_cast<std::uint16_t*>(s.y) + cta_chunks_.row(chunk) * s.y_token_stride +
                       dim_block_.head * s.y_head_stride + dim_block_.first_dim;
    constexpr int kVectors = kDimBlockDims / kVectorElements;
    const int tokens = cta_chunks_.tokens(chunk);
#pragma unroll 1
    for (int i = thread_of_warpgroup(); i < kChunk * kVectors; i += kWarpgroup) {
      const int token = i / kVectors;
      if (token >= tokens) break;
      const uint4 vector = cuda::load_shared_16(tile + cuda::swizzled(token, i % kVectors));
      std::uint16_t* const target = rows + token * s.y_token_stride + i % kVectors * kVectorElements;
      if (s.y_aligned) {
        *reinterpret_cast<uint4*>(target) = vector;
        continue;
      }
      const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
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
  const SsdChunks& cta_chunks_;
  const SsdDimBlock<kStates, true> dim_block_;
  const SsdGateGradient* const gate_gradient_;
  const float skip_;  // D, or zero
  float state_[kStates / 8][4];
};

// By a CTA: y of its chunks, or dz.
template <int kStates, bool kGateGradient>
__device__ __forceinline__ void compute_outputs(const HopperSsd& p, const SsdMemory<kStates, true>& memory,
                                                const SsdChunks& cta_chunks, const SsdGateGradient* gate_gradient) {
  if (threadIdx.x == 0) memory.init_barriers(cta_chunks.block.count);
  // Scores above the diagonal stay zero.
  constexpr int kIntraChunkVectors = kDimBlocksPerCta * kDimBlockTileBytes / 16;
  auto* const intra_chunk_scores = reinterpret_cast<uint4*>(memory.bytes + SsdLayout<kStates, true>::kIntraChunkScores);
  for (int i = static_cast<int>(threadIdx.x); i < kIntraChunkVectors; i += kSsdThreads)
    intra_chunk_scores[i] = make_uint4(0, 0, 0, 0);
  proxy_fence();
  __syncthreads();
  const int warpgroup = static_cast<int>(warp_uniform(threadIdx.x / kWarpgroup));
  if (warpgroup == kDimBlocksPerCta) {
    reg_dealloc<kSsdScoreRegisters>();
    const DimBlockDecays<kStates> decays(memory, cta_chunks.block.count, p.scan.scale);
    SharedScores<kStates> scores(memory, p.scan.scale);
    load_chunks<1>(
        p, memory, cta_chunks, [](int) {},
        [&](int chunk) {
          scores.compute(chunk);
          decays.compute(chunk);
        });
  } else {
    reg_alloc<kSsdOutputRegisters>();
    if (warpgroup < cta_chunks.block.count) {
      SsdOutput<kStates, kGateGradient>(p, memory, cta_chunks, warpgroup, gate_gradient).run();
    }
  }
}

template <int kStates>
__global__ void __launch_bounds__(kSsdThreads, 1) ssd_finish_kernel(const __grid_constant__ HopperSsd p) {
  extern __shared__ unsigned char ssd_shared[];
  compute_outputs<kStates, false>(p, SsdMemory<kStates, true>(ssd_shared), SsdChunks(p), nullptr);
}

}  // namespace ringattn::sm90
