// SPDX-License-Identifier: Apache-2.0
// C · Bᵀ of a chunk, computed once for all dim blocks of a CTA by the producer warpgroup, and the intra-chunk scores of
// each head: (C · Bᵀ)[i, j] · exp2(dA_cumsum[i] − dA_cumsum[j]) · dt[j], rounded to bf16, stored as the B operand of
// wgmma with rows i.
#pragma once

#include "kernels/common/sm90/matrix.cuh"
#include "kernels/common/sm90/wgmma_m64n32_ss.cuh"
#include "kernels/ssm/sm90/ssd_dim_block.cuh"

namespace ringattn::sm90 {

// Scores on and below the diagonal are stored in tiles of 16 rows and 8 columns, as accumulator fragments. Returns the
// index of tile j of rows [16 · row, 16 · row + 16).
__device__ __forceinline__ int score_tile(int row, int j) { return row * (row + 1) + j; }

// Computes columns [32 · half, 32 · half + 32) of a chunk's scores, by a warpgroup. All columns at once would take
// registers from the dim blocks. A thread has columns 8 j + column_of_thread() + {0, 1} of row tile_row_of_thread() in
// [j][0, 1], and of the row 8 below in [j][2, 3].
template <int kStates>
__device__ __forceinline__ void score_half(std::uint32_t c_tile, std::uint32_t b_tile, int half,
                                           float (&scores)[kChunk / 16][4]) {
  const std::uint32_t c = warp_uniform(descriptor_low(c_tile));
  const std::uint32_t b =
      warp_uniform(descriptor_low(b_tile + static_cast<std::uint32_t>(half * kDimBlockTileBytes / 2)));
  pin(scores);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kStates / 16; ++k) {
    const auto at = static_cast<std::uint32_t>((k / 4 * kDimBlockTileBytes + k % 4 * 32) >> 4);
    wgmma_m64n32_ss(scores, descriptor(c + at), descriptor(b + at), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(scores);
}

// Stores the 16 x 16 blocks on and below the diagonal, times `scale`.
__device__ __forceinline__ void store_half(const float (&scores)[kChunk / 16][4], float scale, int half, float4* to) {
  const int row = thread_of_warpgroup() / 32;
  const int lane = thread_of_warpgroup() % 32;
#pragma unroll
  for (int j = 0; j < kChunk / 16; ++j) {
    if (2 * half + j / 2 > row) break;
    to[score_tile(row, 4 * half + j) * 32 + lane] =
        make_float4(__fmul_rn(scores[j][0], scale), __fmul_rn(scores[j][1], scale), __fmul_rn(scores[j][2], scale),
                    __fmul_rn(scores[j][3], scale));
  }
}

// C · Bᵀ of each chunk, for all dim blocks. By the producer warpgroup.
template <int kStates>
class SharedScores {
 public:
  // `scale`: of y.
  __device__ __forceinline__ SharedScores(const SsdMemory<kStates, true>& shared, float scale)
      : memory_(shared), scale_(scale) {}

  __device__ __forceinline__ void compute(int chunk) {
    const std::uint32_t stage = ring_.stage();
    barrier_wait(memory_.full(stage), ring_.parity());
    ring_.advance();
    const auto buffer = static_cast<std::uint32_t>(chunk) & 1U;
    barrier_wait(memory_.scores_empty(buffer), (static_cast<std::uint32_t>(chunk) >> 1 & 1U) ^ 1U);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      float scores[kChunk / 16][4];
      score_half<kStates>(memory_.c(stage), memory_.b(stage), half, scores);
      store_half(scores, scale_, half, memory_.scores(buffer));
    }
    __syncwarp();
    if (thread_of_warpgroup() % 32 == 0) barrier_arrive(memory_.scores_full(buffer));
  }

 private:
  const SsdMemory<kStates, true>& memory_;
  const float scale_;
  PackedPipelineState<SsdLayout<kStates, true>::kStages> ring_;
};

// Word of the state scales of a pair of tokens. A lane of an A fragment needs pairs lane % 4 + 4 r, and finds them
// adjacent.
__device__ __forceinline__ int state_scale_word(int pair) { return pair % 4 * 8 + pair / 4; }
// Word of the prefix decays of a pair of tokens. A lane of an accumulator needs pairs lane % 4 + 4 j, and finds them
// adjacent.
__device__ __forceinline__ int prefix_decay_word(int pair) { return pair % 4 * kPrefixDecayLaneFloats + pair / 4 * 2; }

// Prefix decays, times `scale` of y, and state scales of a chunk's tokens, by one warp of the producer warpgroup per
// dim block. They overwrite those of two chunks before. All reads of these are done when the chunk's dA_cumsum has
// landed.
template <int kStates>
class DimBlockDecays {
 public:
  __device__ __forceinline__ DimBlockDecays(const SsdMemory<kStates, true>& shared, int dim_blocks, float scale)
      : memory_(shared), dim_blocks_(dim_blocks), scale_(scale) {}

  __device__ __forceinline__ void compute(int chunk) const {
    using DimBlock = SsdDimBlock<kStates, true>;
    const int index = warp_of_warpgroup();
    if (index >= dim_blocks_) return;
    const int lane = thread_of_warpgroup() % 32;
    const int input = DimBlock::input_stage(chunk);
    barrier_wait(memory_.x_full(index, input), DimBlock::parity(chunk));
    const float* const da_cumsum = memory_.da_cumsum(index, input);
    float* const prefix_decay = memory_.prefix_decay(index, input);
    const float2 sums = reinterpret_cast<const float2*>(da_cumsum)[lane];
    *reinterpret_cast<float2*>(prefix_decay + prefix_decay_word(lane)) =
        make_float2(__fmul_rn(cuda::exp2_approx(sums.x), scale_), __fmul_rn(cuda::exp2_approx(sums.y), scale_));
    const float2 scales = state_scale_pair(da_cumsum, lane);
    reinterpret_cast<std::uint32_t*>(memory_.state_scale(index, input))[state_scale_word(lane)] =
        cuda::MmaTraits<__nv_bfloat16>::pack(scales.x, scales.y);
    __syncwarp();
    if (lane == 0) barrier_arrive(memory_.state_scale_full(index, input));
  }

 private:
  const SsdMemory<kStates, true>& memory_;
  const int dim_blocks_;
  const float scale_;
};

// A tile of scores, with dA_cumsum and dt of its columns and dA_cumsum of its rows.
struct ScoreTile {
  float4 scores;
  float2 before, dt;
  float sums[2];

  // Loads this lane's elements of tile j of rows [16 · row, 16 · row + 16).
  __device__ __forceinline__ ScoreTile(const float4* of_all, const float* da_cumsum, int row, int j, int lane)
      : scores(of_all[score_tile(row, j) * 32 + lane]),
        before(*reinterpret_cast<const float2*>(da_cumsum + 8 * j + lane % 4 * 2)),
        dt(*reinterpret_cast<const float2*>(da_cumsum + kChunk + 8 * j + lane % 4 * 2)),
        sums{da_cumsum[16 * row + lane / 4], da_cumsum[16 * row + 8 + lane / 4]} {}

  // Intra-chunk scores of the lane's pair of columns in both rows. On the diagonal, `offset` is the pair's first column
  // minus the lane's first row. Scores of later tokens are 0, and D (`skip`) is added to the score of a row's own
  // token.
  template <bool kDiagonal>
  __device__ __forceinline__ void intra_chunk_pair(float skip, int offset,
                                                   std::uint32_t (&intra_chunk_scores)[2]) const {
    const auto score_of = [&](float score, float sum, float to, float step, int column) {
      const float decayed = __fmul_rn(score, cuda::exp2_approx(__fsub_rn(sum, to)));
      const float scaled = __fmul_rn(decayed, step);
      if (!kDiagonal) return scaled;
      return column <= 0 ? __fadd_rn(scaled, column == 0 ? skip : 0.0F) : 0.0F;
    };
    using Pack = cuda::MmaTraits<__nv_bfloat16>;
    intra_chunk_scores[0] = Pack::pack(score_of(scores.x, sums[0], before.x, dt.x, offset),
                                       score_of(scores.y, sums[0], before.y, dt.y, offset + 1));
    intra_chunk_scores[1] = Pack::pack(score_of(scores.z, sums[1], before.x, dt.x, offset - 8),
                                       score_of(scores.w, sums[1], before.y, dt.y, offset - 7));
  }
};

// Stores all intra-chunk scores of a chunk on and below the diagonal to `tile`, by a warpgroup. Each warp computes one
// 16 x 16 block on the diagonal, one below it, and half of another one. `da_cumsum` is that of the chunk.
__device__ __forceinline__ void store_intra_chunk_scores(const float4* scores, const float* da_cumsum, float skip,
                                                         std::uint32_t tile) {
  const int warp = warp_of_warpgroup();
  const int lane = thread_of_warpgroup() % 32;
  // Blocks (1, 0), (2, 0), (2, 1), (3, 0), then the 16 x 8 tiles of (3, 1) and (3, 2).
  const int row = warp == 0 ? 1 : warp == 3 ? 3 : 2;
  const int column = warp == 2 ? 1 : 0;
  const ScoreTile tiles[5] = {{scores, da_cumsum, warp, 2 * warp, lane},
                              {scores, da_cumsum, warp, 2 * warp + 1, lane},
                              {scores, da_cumsum, row, 2 * column, lane},
                              {scores, da_cumsum, row, 2 * column + 1, lane},
                              {scores, da_cumsum, 3, 2 + warp, lane}};
  std::uint32_t intra_chunk_scores[5][2];
  const int offset = lane % 4 * 2 - lane / 4;
  tiles[0].intra_chunk_pair<true>(skip, offset, intra_chunk_scores[0]);
  tiles[1].intra_chunk_pair<true>(skip, offset + 8, intra_chunk_scores[1]);
#pragma unroll
  for (int i = 2; i < 5; ++i) tiles[i].intra_chunk_pair<false>(0.0F, 0, intra_chunk_scores[i]);
  const std::uint32_t stored_row = tile + static_cast<std::uint32_t>(lane % 16 * cuda::kPanelRowBytes);
  const auto at = [&](int block_row, int vector) {
    return stored_row + static_cast<std::uint32_t>(block_row * 16 * cuda::kPanelRowBytes + (vector ^ (lane % 8)) * 16);
  };
  store_matrix(at(warp, 2 * warp + lane / 16), {intra_chunk_scores[0][0], intra_chunk_scores[0][1],
                                                intra_chunk_scores[1][0], intra_chunk_scores[1][1]});
  store_matrix(at(row, 2 * column + lane / 16), {intra_chunk_scores[2][0], intra_chunk_scores[2][1],
                                                 intra_chunk_scores[3][0], intra_chunk_scores[3][1]});
  store_matrix(at(3, 2 + warp), intra_chunk_scores[4]);
}

}  // namespace ringattn::sm90
