// SPDX-License-Identifier: Apache-2.0
// Outputs y (kernels/ssm/ssm.hpp, 4). A CTA processes a segment for some heads of one group, chunk by chunk, starting
// from the state before the segment. C · Bᵀ of a chunk is computed once for all heads. Each head scales it by its own
// decays and dt.
#pragma once

#include "kernels/ssm/sm80/ssd_state.cuh"

namespace ringattn::sm80 {

// C · Bᵀ on and below the diagonal, in fp32. Blocks of 16 × 16 are distributed over all warps of the CTA.
template <class Element, int kStates>
__device__ __forceinline__ void compute_scores(std::uint32_t c, std::uint32_t b, float* scores) {
  constexpr int kPitch = pitch_of(kStates);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int block = static_cast<int>(threadIdx.x) / 32; block < kScoreBlocks;
       block += static_cast<int>(blockDim.x) / 32) {
    const int row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    const int column = block - row * (row + 1) / 2;
    float sum[2][4] = {};
#pragma unroll
    for (int k = 0; k < kStates / 16; ++k) {
      std::uint32_t left[4];
      std::uint32_t right[4];
      load_matrix(left, tile_at(c, 16 * row, 16 * k, kPitch) + down_first(lane, kPitch));
      load_matrix(right, tile_at(b, 16 * column, 16 * k, kPitch) + right_first(lane, kPitch));
      cuda::MmaTraits<Element>::mma(sum[0], left, right[0], right[1], sum[0]);
      cuda::MmaTraits<Element>::mma(sum[1], left, right[2], right[3], sum[1]);
    }
    float* const target = scores + (16 * row + lane / 4) * kScorePitch + 16 * column + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      *reinterpret_cast<float2*>(target + 8 * t) = make_float2(sum[t][0], sum[t][1]);
      *reinterpret_cast<float2*>(target + 8 * kScorePitch + 8 * t) = make_float2(sum[t][2], sum[t][3]);
    }
  }
}

// Intra-chunk scores of a head: (C · Bᵀ)[i, j] · exp2(dA_cumsum[i] − dA_cumsum[j]) · dt[j], as hi/lo pairs; 0 above the
// diagonal. Blocks are distributed over the head's warps.
__device__ __forceinline__ void compute_intra_chunk_scores(const float* scores, const float* da_cumsum,
                                                           std::uint32_t intra_chunk_scores, const WarpCoord& coord,
                                                           int warps) {
  for (int block = coord.warp; block < kScoreBlocks; block += warps) {
    const int block_row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    const int row = 16 * block_row + coord.lane % 16;
    const int column = 16 * (block - block_row * (block_row + 1) / 2) + coord.lane / 16 * 8;
    const float sum = da_cumsum[row];
    float scaled[8];
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      const int at = column + 4 * quarter;
      const float4 score = *reinterpret_cast<const float4*>(scores + row * kScorePitch + at);
      const float4 sums = *reinterpret_cast<const float4*>(da_cumsum + at);
      const float4 dt = *reinterpret_cast<const float4*>(da_cumsum + kChunk + at);
      const auto set_scaled = [&](int i, float value, float to, float step) {
        const float decayed = __fmul_rn(value, cuda::exp2_approx(__fsub_rn(sum, to)));
        scaled[4 * quarter + i] = at + i <= row ? __fmul_rn(decayed, step) : 0.0F;
      };
      set_scaled(0, score.x, sums.x, dt.x);
      set_scaled(1, score.y, sums.y, dt.y);
      set_scaled(2, score.z, sums.z, dt.z);
      set_scaled(3, score.w, sums.w, dt.w);
    }
    std::uint32_t hi[4];
    std::uint32_t lo[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) split_hi_lo(scaled[2 * i], scaled[2 * i + 1], hi[i], lo[i]);
    const std::uint32_t target = tile_at(intra_chunk_scores, row, column, kIntraChunkPitch);
    cuda::store_shared(target, make_uint4(hi[0], hi[1], hi[2], hi[3]));
    cuda::store_shared(target + kChunk * kIntraChunkPitch, make_uint4(lo[0], lo[1], lo[2], lo[3]));
  }
}

// A warp's outputs of a chunk: element [m][t][e] is token 16 m + row() + e / 2 · 8, dim first_dim + 8 t + column() + e
// % 2.
struct OutputTile {
  float y[kChunk / 16][2][4];
};

// y += C · Sᵀ. The state in registers is the B operand.
template <class Element, int kStates>
__device__ __forceinline__ void multiply_state(OutputTile& rows, const StateTile<kStates>& state, std::uint32_t c,
                                               int lane) {
  constexpr int kPitch = pitch_of(kStates);
#pragma unroll
  for (int k = 0; k < kStates / 16; ++k) {
    std::uint32_t hi[2][2];
    std::uint32_t lo[2][2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&s)[4] = state.s[2 * k + half];
        split_hi_lo(s[2 * t], s[2 * t + 1], hi[t][half], lo[t][half]);
      }
    }
#pragma unroll
    for (int m = 0; m < kChunk / 16; ++m) {
      std::uint32_t raw[4];
      load_matrix(raw, tile_at(c, 16 * m, 16 * k, kPitch) + down_first(lane, kPitch));
      const InputOperand<Element, 4> operand(raw);
      multiply_right<Element>(rows.y[m][0], operand, hi[0], lo[0]);
      multiply_right<Element>(rows.y[m][1], operand, hi[1], lo[1]);
    }
  }
}

// y += intra-chunk scores · x, for blocks on and below the diagonal.
template <class Element>
__device__ __forceinline__ void multiply_scores(OutputTile& rows, const WarpCoord& coord,
                                                std::uint32_t intra_chunk_scores, std::uint32_t x, int x_pitch) {
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
    std::uint32_t raw[4];
    load_matrix_transposed(raw, tile_at(x, 16 * k, coord.first_dim, x_pitch) + down_first(coord.lane, x_pitch));
    const InputOperand<Element, 4> operand(raw);
#pragma unroll
    for (int m = k; m < kChunk / 16; ++m) {
      std::uint32_t hi[4];
      std::uint32_t lo[4];
      const std::uint32_t at =
          tile_at(intra_chunk_scores, 16 * m, 16 * k, kIntraChunkPitch) + down_first(coord.lane, kIntraChunkPitch);
      load_matrix(hi, at);
      load_matrix(lo, at + kChunk * kIntraChunkPitch);
      multiply_left(rows.y[m][0], hi, lo, operand, 0);
      multiply_left(rows.y[m][1], hi, lo, operand, 1);
    }
  }
}

// Loads two adjacent elements; `aligned`: as one word.
__device__ __forceinline__ std::uint32_t load_pair(const std::uint16_t* at, bool aligned) {
  if (aligned) return __ldg(reinterpret_cast<const std::uint32_t*>(at));
  return at[0] | static_cast<std::uint32_t>(at[1]) << 16;
}

// Adds D · x, applies the gate, rounds and stores. Lanes exchange pairs, so that each stores four adjacent elements.
template <class Element>
__device__ __forceinline__ void store_output(const SsmParams& p, const WarpCoord& coord, const OutputTile& rows,
                                             std::int64_t first_row, int tokens, std::uint32_t x, int x_pitch) {
  constexpr int kStep = 8;  // stride of a lane's rows
  const float skip = p.d != nullptr ? p.d[coord.head] : 0.0F;
  const bool odd = coord.lane % 2 != 0;
  const int dim = coord.first_dim + coord.column();
  const int dim_written = odd ? dim + 8 - 2 : dim;
  const std::int64_t row = first_row + coord.row();
  auto* target = static_cast<std::uint16_t*>(p.y) + row * p.y_token_stride + coord.head * p.y_head_stride + dim_written;
  const auto* z =
      static_cast<const std::uint16_t*>(p.z.data) + row * p.z.token_stride + coord.head * p.z.head_stride + dim;
#pragma unroll
  for (int step = 0; step < kChunk / kStep; ++step) {
    const int i = coord.row() + kStep * step;
    std::uint32_t packed[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float first = rows.y[step / 2][t][step % 2 * 2];
      float second = rows.y[step / 2][t][step % 2 * 2 + 1];
      if (p.d != nullptr) {
        const float2 operand = unpack(
            static_cast<std::uint32_t>(cuda::load_shared_number(tile_at(x, i, dim + 8 * t, x_pitch))), Element());
        first = __fmaf_rn(skip, operand.x, first);
        second = __fmaf_rn(skip, operand.y, second);
      }
      if (p.z.data != nullptr && i < tokens && dim + 8 * t < p.head_dim) {
        const float2 gate = unpack(load_pair(z + 8 * t, p.z.aligned), Element());
        first = __fmul_rn(first, cuda::silu(gate.x));
        second = __fmul_rn(second, cuda::silu(gate.y));
      }
      packed[t] = cuda::MmaTraits<Element>::pack(first, second);
    }
    const std::uint32_t other = __shfl_xor_sync(0xffffffffU, odd ? packed[0] : packed[1], 1);
    const std::uint32_t low = odd ? other : packed[0];
    const std::uint32_t high = odd ? packed[1] : other;
    if (i < tokens && dim_written < p.head_dim) {
      if (p.y_aligned) {
        *reinterpret_cast<uint2*>(target) = make_uint2(low, high);
      } else {
        target[0] = static_cast<std::uint16_t>(low);
        target[1] = static_cast<std::uint16_t>(low >> 16);
        target[2] = static_cast<std::uint16_t>(high);
        target[3] = static_cast<std::uint16_t>(high >> 16);
      }
    }
    target += kStep * p.y_token_stride;
    z += kStep * p.z.token_stride;
  }
}

template <int kStates>
constexpr int finish_threads() {
  return kStates <= 128 ? 384 : 256;
}

template <class Element, int kStates>
__global__ void __launch_bounds__(finish_threads<kStates>(), 1) ssd_finish_kernel(const __grid_constant__ SsdParams p) {
  extern __shared__ __align__(16) float ssd_memory[];
  const HeadBlock heads = block_of_heads(p);
  const ChunkPipeline<kStates> pipeline{p, cuda::shared_address(ssd_memory), segment_of_cta(p), heads};
  const WarpCoord coord(heads, p.shape);
  const bool present = coord.head_index < heads.count;
  float* const scores = ssd_memory + p.layout.scores / 4;
  float* const prefix_decay = ssd_memory + p.layout.decays / 4 + 2 * coord.head_index * kChunk;
  float* const state_scale = prefix_decay + kChunk;
  const std::uint32_t intra_chunk_scores =
      pipeline.memory + p.layout.intra_chunk_scores + coord.head_index * 2 * kChunk * kIntraChunkPitch;

  // Loads the state before the segment.
  StateTile<kStates> state{};
  if (present) {
    const std::int64_t state_floats = std::int64_t{p.scan.head_dim} * p.scan.state_dim;
    const SegmentCoord& segment = pipeline.coord;
    const std::int64_t of_segment = segment.index * p.scan.heads + coord.head;
    const std::int64_t of_super = segment.super_segment * p.scan.heads + coord.head;
    const float* const local = segment.first_of_super ? nullptr : p.scan.states + of_segment * state_floats;
    const float* const before = segment.from_zero ? nullptr : p.scan.super_states + of_super * state_floats;
    const float decay = cuda::exp2_approx(segment.first_of_super ? 0.0F : p.scan.logs_before[of_segment]);
    state.visit(p.scan, coord, [&](float& first, float& second, int offset) {
      const float2 m = cuda::state_pair(local, offset);
      const float2 t = cuda::state_pair(before, offset);
      first = __fmaf_rn(decay, t.x, m.x);
      second = __fmaf_rn(decay, t.y, m.y);
    });
  }

  pipeline.for_each_chunk(true, [&](int chunk, int stage) {
    const std::uint32_t x = pipeline.x(stage, coord.head_index);
    const float* const da_cumsum = ssd_memory + pipeline.da_cumsum(stage, coord.head_index);
    compute_scores<Element, kStates>(pipeline.c(stage), pipeline.b(stage), scores);
    OutputTile rows{};
    if (present) {
      for (int i = coord.thread(); i < kChunk; i += p.shape.warps * 32)
        prefix_decay[i] = cuda::exp2_approx(da_cumsum[i]);
      compute_state_scale(da_cumsum, state_scale, coord, p.shape.warps);
      multiply_state<Element>(rows, state, pipeline.c(stage), coord.lane);
    }
    __syncthreads();                                                     // the scores are written
    if (!present) return head_barrier(coord.head_index, p.shape.warps);  // racecheck requires the barrier of every warp
    compute_intra_chunk_scores(scores, da_cumsum, intra_chunk_scores, coord, p.shape.warps);
#pragma unroll
    for (int m = 0; m < kChunk / 16; ++m) {
      const float above = prefix_decay[16 * m + coord.row()];
      const float below = prefix_decay[16 * m + coord.row() + 8];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        rows.y[m][t][0] = __fmul_rn(rows.y[m][t][0], above);
        rows.y[m][t][1] = __fmul_rn(rows.y[m][t][1], above);
        rows.y[m][t][2] = __fmul_rn(rows.y[m][t][2], below);
        rows.y[m][t][3] = __fmul_rn(rows.y[m][t][3], below);
      }
    }
    head_barrier(coord.head_index, p.shape.warps);  // the intra-chunk scores are written
    multiply_scores<Element>(rows, coord, intra_chunk_scores, x, pipeline.x_pitch());
    store_output<Element>(p.scan, coord, rows, pipeline.coord.row + chunk * kChunk,
                          pipeline.coord.tokens - chunk * kChunk, x, pipeline.x_pitch());
    if (chunk + 1 < pipeline.chunks()) {
      accumulate_chunk<Element>(state, coord, x, pipeline.x_pitch(), pipeline.b(stage), state_scale,
                                cuda::exp2_approx(da_cumsum[kChunk - 1]));
    }
  });
}

}  // namespace ringattn::sm80
