// SPDX-License-Identifier: Apache-2.0
// Gradient of the gate: dz = dy · (S · C + D · x) · silu'(z). A CTA computes a chunk for a set of heads, one head at a
// time, from the state before the chunk. Warps 2 i and 2 i + 1 have rows [16 i, 16 i + 16), and half of the dims each.
// Rounding is that of ssd_rows_kernel.
#pragma once

#include "kernels/ssd_backward/sm80/ssd_rows.cuh"

namespace ringattn::sm80 {

template <class Element, int kDims, int kStates>
__global__ void __launch_bounds__(SsdGateShape<kDims, kStates>::kThreads, 2)
    ssd_gate_kernel(const __grid_constant__ SsdGateParams p) {
  using Shape = SsdGateShape<kDims, kStates>;
  constexpr int kXPitch = Shape::kXPitch;
  constexpr int kBPitch = Shape::kBPitch;
  constexpr int kHalf = kDims / 2;
  extern __shared__ __align__(16) float ssd_memory[];
  const SsmParams& s = p.scan;
  const std::uint32_t memory = cuda::shared_address(ssd_memory);
  const int nth = static_cast<int>(blockIdx.x) / p.blocks / kChunksOfSegment;
  const int chunk = static_cast<int>(blockIdx.x) / p.blocks % kChunksOfSegment;
  const SegmentCoord segment = cuda::segment_coord(s, p.first_segment + nth);
  const HeadBlock heads = cuda::head_block(s, p.set_heads, static_cast<int>(blockIdx.x) % p.blocks);
  const int tokens = segment.tokens - chunk * kChunk;
  if (tokens <= 0) return;
  const std::int64_t first_row = segment.row + chunk * kChunk;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int block_row = thread / 64;
  const int half = thread / 32 % 2;
  const std::uint32_t c = memory + Shape::kC;
  const std::uint32_t scores = memory + Shape::kScores;
  const auto stage_of = [](int index) { return Shape::kHead + index % Shape::kStages * Shape::kStageBytes; };
  const auto issue = [&](int index) {
    if (index < heads.count) {
      const std::uint32_t target = memory + static_cast<std::uint32_t>(stage_of(index));
      const int head = heads.first + index;
      copy_chunk_rows<Shape::kThreads, kDims>(target, s.x, first_row, head, tokens, s.head_dim);
      const std::int64_t of_chunk = (std::int64_t{nth} * kChunksOfSegment + chunk) * s.head_count + head - s.first_head;
#pragma unroll
      for (int i = 0; i < kDims * kStates / kVectorElements / Shape::kThreads; ++i) {
        const int element = (i * Shape::kThreads + thread) * kVectorElements;
        cuda::copy_16(
            target + Shape::kState +
                static_cast<std::uint32_t>(element / kStates * kBPitch + element % kStates * kElementBytes),
            p.states + of_chunk * (kDims * kStates) + chunk_state_offset<kDims>(element / kStates, element % kStates),
            true);
      }
      if (thread < kChunkDaCumsumFloats / 4) {
        const std::int64_t from =
            ((segment.index * s.heads + head) * kChunksOfSegment + chunk) * kChunkDaCumsumFloats + thread * 4;
        cuda::copy_16(target + Shape::kDaCumsum + thread * 16, s.da_cumsum + from, true);
      }
    }
    cuda::copy_commit();
  };
  copy_chunk_rows<Shape::kThreads, kStates>(memory, s.b, first_row, heads.group, tokens, s.state_dim);
  copy_chunk_rows<Shape::kThreads, kStates>(c, s.c, first_row, heads.group, tokens, s.state_dim);
  issue(0);
  float cb[2][2][4] = {};
#pragma unroll 1
  for (int index = 0; index < heads.count; ++index) {
    cuda::copy_wait<0>();
    __syncthreads();  // the head has landed, and all reads of the previous one are done
    issue(index + 1);
    const std::uint32_t x = memory + static_cast<std::uint32_t>(stage_of(index));
    const float* const da_cumsum = ssd_memory + (stage_of(index) + Shape::kDaCumsum) / 4;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int block_column = half + 2 * u;
      if (block_column > block_row) continue;
      if (index == 0) {
#pragma unroll
        for (int k = 0; k < kStates / 16; ++k) {
          std::uint32_t left[4];
          std::uint32_t right[4];
          load_matrix(left, tile_at(c, 16 * block_row, 16 * k, kBPitch) + down_first(lane, kBPitch));
          load_matrix(right, tile_at(memory, 16 * block_column, 16 * k, kBPitch) + right_first(lane, kBPitch));
          cuda::MmaTraits<Element>::mma(cb[u][0], left, right[0], right[1], cb[u][0]);
          cuda::MmaTraits<Element>::mma(cb[u][1], left, right[2], right[3], cb[u][1]);
        }
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int row = 16 * block_row + lane / 4;
        const int column = 16 * block_column + 8 * t + lane % 4 * 2;
        float weights[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = row + e / 2 * 8;
          const int j = column + e % 2;
          const float decay = cuda::exp2_approx(__fsub_rn(da_cumsum[i], da_cumsum[j]));
          weights[e] = j <= i ? __fmul_rn(__fmul_rn(cb[u][t][e], decay), da_cumsum[kChunk + j]) : 0.0F;
        }
        const std::uint32_t target = tile_at(scores, row, column, kIntraChunkPitch);
        cuda::store_shared(target, Bf16Mma::pack(weights[0], weights[1]));
        cuda::store_shared(target + 8 * kIntraChunkPitch, Bf16Mma::pack(weights[2], weights[3]));
      }
    }
    __syncthreads();
    float y[kHalf / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kStates / 16; ++k) {
      std::uint32_t raw[4];
      load_matrix(raw, tile_at(c, 16 * block_row, 16 * k, kBPitch) + down_first(lane, kBPitch));
      const InputOperand<Element, 4> left(raw);
#pragma unroll
      for (int n = 0; n < kHalf / 16; ++n) {
        std::uint32_t right[4];
        load_matrix(right,
                    tile_at(x + Shape::kState, half * kHalf + 16 * n, 16 * k, kBPitch) + right_first(lane, kBPitch));
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
          for (const auto& addend : left.addend) {
            Bf16Mma::mma(y[2 * n + t], addend, right[2 * t], right[2 * t + 1], y[2 * n + t]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kHalf / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float decay = cuda::exp2_approx(da_cumsum[16 * block_row + lane / 4 + e / 2 * 8]);
        y[n][e] = __fmul_rn(decay, y[n][e]);
      }
    }
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      if (k > block_row) continue;
      std::uint32_t left[1][4];
      load_matrix(left[0],
                  tile_at(scores, 16 * block_row, 16 * k, kIntraChunkPitch) + down_first(lane, kIntraChunkPitch));
#pragma unroll
      for (int n = 0; n < kHalf / 16; ++n) {
        std::uint32_t raw[4];
        load_matrix_transposed(raw, tile_at(x, 16 * k, half * kHalf + 16 * n, kXPitch) + down_first(lane, kXPitch));
        const InputOperand<Element, 4> operand(raw);
        multiply_factor(y[2 * n], left, operand, 0);
        multiply_factor(y[2 * n + 1], left, operand, 1);
      }
    }
    const int head = heads.first + index;
    const float skip = s.d != nullptr ? s.d[head] : 0.0F;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * block_row + lane / 4 + 8 * i;
      const bool present = row < tokens;
      const auto* const gates = cuda::element_at<std::uint16_t>(s.z, first_row + (present ? row : 0), head);
      const auto* const given = cuda::element_at<std::uint16_t>(p.dy, first_row + (present ? row : 0), head);
#pragma unroll
      for (int n = 0; n < kHalf / 16; ++n) {
        float2 pairs[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int column = half * kHalf + 16 * n + 8 * t + lane % 4 * 2;
          pairs[t] = make_float2(0.0F, 0.0F);
          if (!present || column >= s.head_dim) continue;
          float first = y[2 * n + t][2 * i];
          float second = y[2 * n + t][2 * i + 1];
          if (s.d != nullptr) {
            const float2 at = load_pair_of<Element>(x, row, column, kXPitch);
            first = __fmaf_rn(skip, at.x, first);
            second = __fmaf_rn(skip, at.y, second);
          }
          const float2 z = unpack(load_pair(gates + column, s.z.aligned), Element());
          const float2 dy = unpack(load_pair(given + column, p.dy.aligned), Element());
          pairs[t] = make_float2(__fmul_rn(__fmul_rn(dy.x, first), cuda::silu_slope(z.x)),
                                 __fmul_rn(__fmul_rn(dy.y, second), cuda::silu_slope(z.y)));
        }
        cuda::store_gradient_pairs<Element>(p.dz, first_row + row, head, half * kHalf + 16 * n + lane % 4 * 2,
                                            s.head_dim, present, pairs[0], pairs[1], lane);
      }
    }
  }
}

}  // namespace ringattn::sm80
