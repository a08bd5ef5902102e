// SPDX-License-Identifier: Apache-2.0
// C · Bᵀ of a chunk, computed once for all dim_blocks of a CTA by the warpgroup that fetches, and what each head makes
// of it: intra_chunk_scores of tokens j in rows i, scores · a(tokens j + 1 … i) · dt_j, rounded to bf16, as a right
// operand of wgmma with rows i.
#pragma once

#include "kernels/sm90/ptx/matrix.cuh"
#include "kernels/sm90/ptx/wgmma_narrow.cuh"
#include "kernels/sm90/scan/ssd_dim_block.cuh"

namespace ringattn::sm90 {

// Scores on and below the diagonal lie by units of 16 rows and 8 columns, as warps have them: the number of unit j of
// rows [16 · row, 16 · row + 16).
__device__ __forceinline__ int score_tile(int row, int j) { return row * (row + 1) + j; }

// Columns [32 · half, 32 · half + 32) of a chunk's scores, by a warpgroup: all of them at once would cost the
// dim_blocks registers. A thread has columns 8 j + column_of_thread() + {0, 1} of them of row tile_row_of_thread() in
// [j][0, 1], and of the row 8 below in [j][2, 3].
template <int kStates>
__device__ __forceinline__ void score_half(std::uint32_t c_tile, std::uint32_t b_tile, int half,
                                           float (&scores)[kChunk / 16][4]) {
  const std::uint32_t c = of_warp(descriptor_low(c_tile));
  const std::uint32_t b = of_warp(descriptor_low(b_tile + static_cast<std::uint32_t>(half * kDimBlockTileBytes / 2)));
  pin(scores);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kStates / 16; ++k) {
    const auto at = static_cast<std::uint32_t>((k / 4 * kDimBlockTileBytes + k % 4 * 32) >> 4);
    multiply_narrow(scores, descriptor(c + at), descriptor(b + at), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(scores);
}

// Those on and below the diagonal's blocks.
__device__ __forceinline__ void store_half(const float (&scores)[kChunk / 16][4], int half, float4* to) {
  const int row = thread_of_warpgroup() / 32;
  const int lane = thread_of_warpgroup() % 32;
#pragma unroll
  for (int j = 0; j < kChunk / 16; ++j) {
    if (2 * half + j / 2 > row) break;
    to[score_tile(row, 4 * half + j) * 32 + lane] = make_float4(scores[j][0], scores[j][1], scores[j][2], scores[j][3]);
  }
}

// By the warpgroup that fetches: scores of each chunk, for all dim_blocks.
template <int kStates>
class SharedScores {
 public:
  __device__ __forceinline__ explicit SharedScores(const SsdMemory<kStates, true>& shared) : memory_(shared) {}

  __device__ __forceinline__ void make(int chunk) {
    const std::uint32_t stage = ring_.stage();
    barrier_wait(memory_.full(stage), ring_.parity());
    ring_.advance();
    const auto buffer = static_cast<std::uint32_t>(chunk) & 1U;
    barrier_wait(memory_.scores_empty(buffer), (static_cast<std::uint32_t>(chunk) >> 1 & 1U) ^ 1U);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      float scores[kChunk / 16][4];
      score_half<kStates>(memory_.c(stage), memory_.b(stage), half, scores);
      store_half(scores, half, memory_.scores(buffer));
    }
    __syncwarp();
    if (thread_of_warpgroup() % 32 == 0) barrier_arrive(memory_.scores_full(buffer));
  }

 private:
  const SsdMemory<kStates, true>& memory_;
  PackedPipelineState<SsdLayout<kStates, true>::kStages> ring_;
};

// Where what a pair of tokens is weighed with for the state lies: a lane of a product's left operand has pairs
// lane % 4 + 4 r, and finds them side by side.
__device__ __forceinline__ int behind_word(int pair) { return pair % 4 * 8 + pair / 4; }
// Where the decays up to a pair of tokens lie: a lane of a product's result has pairs lane % 4 + 4 j, and finds them
// side by side.
__device__ __forceinline__ int up_to_word(int pair) { return pair % 4 * kUpToLaneFloats + pair / 4 * 2; }

// By the same, a warp each dim_block: decays up to a chunk's tokens, and what x is weighed with for the state. Where
// they come to lie nobody reads those of two chunks before any more, once the chunk's da_cumsum are there.
template <int kStates>
class DimBlockDecays {
 public:
  __device__ __forceinline__ DimBlockDecays(const SsdMemory<kStates, true>& shared, int dim_blocks)
      : memory_(shared), dim_blocks_(dim_blocks) {}

  __device__ __forceinline__ void make(int chunk) const {
    using Band = SsdDimBlock<kStates, true>;
    const int slot = warp_of_warpgroup();
    if (slot >= dim_blocks_) return;
    const int lane = thread_of_warpgroup() % 32;
    const int input = Band::input_of(chunk);
    barrier_wait(memory_.x_full(slot, input), Band::parity(chunk));
    const float* const da_cumsum = memory_.da_cumsum(slot, input);
    float* const up_to = memory_.up_to(slot, input);
    const float2 sums = reinterpret_cast<const float2*>(da_cumsum)[lane];
    *reinterpret_cast<float2*>(up_to + up_to_word(lane)) =
        make_float2(cuda::exp2_approx(sums.x), cuda::exp2_approx(sums.y));
    const float2 behind = intra_chunk_offset(da_cumsum, lane);
    reinterpret_cast<std::uint32_t*>(memory_.behind(slot, input))[behind_word(lane)] =
        cuda::Products<__nv_bfloat16>::pack(behind.x, behind.y);
    __syncwarp();
    if (lane == 0) barrier_arrive(memory_.behind_full(slot, input));
  }

 private:
  const SsdMemory<kStates, true>& memory_;
  const int dim_blocks_;
};

// A unit of scores and what a dim_block weighs it with: sums of logarithms in its columns, and dt there, and sums in
// its rows.
struct ScoreTile {
  float4 scores;
  float2 before, dt;
  float sums[2];

  // Unit j of rows [16 · row, 16 · row + 16), by a lane.
  __device__ __forceinline__ ScoreTile(const float4* of_all, const float* da_cumsum, int row, int j, int lane)
      : scores(of_all[score_tile(row, j) * 32 + lane]),
        before(*reinterpret_cast<const float2*>(da_cumsum + 8 * j + lane % 4 * 2)),
        dt(*reinterpret_cast<const float2*>(da_cumsum + kChunk + 8 * j + lane % 4 * 2)),
        sums{da_cumsum[16 * row + lane / 4], da_cumsum[16 * row + 8 + lane / 4]} {}

  // The intra_chunk_scores of the lane's pair in either row. On the diagonal `behind` says how many columns the pair
  // begins behind the lane's first row; intra_chunk_scores behind a row's own token are 0, and that token has D, the
  // `skip`, besides.
  template <bool kDiagonal>
  __device__ __forceinline__ void weigh(float skip, int behind, std::uint32_t (&intra_chunk_scores)[2]) const {
    const auto weight = [&](float score, float sum, float to, float step, int column) {
      const float decayed = __fmul_rn(score, cuda::exp2_approx(__fsub_rn(sum, to)));
      const float weight = __fmul_rn(decayed, step);
      if (!kDiagonal) return weight;
      return column <= 0 ? __fadd_rn(weight, column == 0 ? skip : 0.0F) : 0.0F;
    };
    using Pack = cuda::Products<__nv_bfloat16>;
    intra_chunk_scores[0] = Pack::pack(weight(scores.x, sums[0], before.x, dt.x, behind),
                                       weight(scores.y, sums[0], before.y, dt.y, behind + 1));
    intra_chunk_scores[1] = Pack::pack(weight(scores.z, sums[1], before.x, dt.x, behind - 8),
                                       weight(scores.w, sums[1], before.y, dt.y, behind - 7));
  }
};

// All intra_chunk_scores of a chunk by a warpgroup, on and below the diagonal. Each warp has a block of 16 x 16 on it,
// one below it, and half of another one. The da_cumsum are those of the chunk; the tile begins at `tile`.
__device__ __forceinline__ void weight_chunk(const float4* scores, const float* da_cumsum, float skip,
                                             std::uint32_t tile) {
  const int warp = warp_of_warpgroup();
  const int lane = thread_of_warpgroup() % 32;
  // (1, 0), (2, 0), (2, 1), (3, 0); then the units of (3, 1) and (3, 2).
  const int row = warp == 0 ? 1 : warp == 3 ? 3 : 2;
  const int column = warp == 2 ? 1 : 0;
  const ScoreTile units[5] = {{scores, da_cumsum, warp, 2 * warp, lane},
                              {scores, da_cumsum, warp, 2 * warp + 1, lane},
                              {scores, da_cumsum, row, 2 * column, lane},
                              {scores, da_cumsum, row, 2 * column + 1, lane},
                              {scores, da_cumsum, 3, 2 + warp, lane}};
  std::uint32_t intra_chunk_scores[5][2];
  const int behind = lane % 4 * 2 - lane / 4;
  units[0].weigh<true>(skip, behind, intra_chunk_scores[0]);
  units[1].weigh<true>(skip, behind + 8, intra_chunk_scores[1]);
#pragma unroll
  for (int i = 2; i < 5; ++i) units[i].weigh<false>(0.0F, 0, intra_chunk_scores[i]);
  const std::uint32_t stored_row = tile + static_cast<std::uint32_t>(lane % 16 * cuda::kPanelRowBytes);
  const auto at = [&](int block_row, int piece) {
    return stored_row + static_cast<std::uint32_t>(block_row * 16 * cuda::kPanelRowBytes + (piece ^ (lane % 8)) * 16);
  };
  store_matrix(at(warp, 2 * warp + lane / 16), {intra_chunk_scores[0][0], intra_chunk_scores[0][1],
                                                intra_chunk_scores[1][0], intra_chunk_scores[1][1]});
  store_matrix(at(row, 2 * column + lane / 16), {intra_chunk_scores[2][0], intra_chunk_scores[2][1],
                                                 intra_chunk_scores[3][0], intra_chunk_scores[3][1]});
  store_matrix(at(3, 2 + warp), intra_chunk_scores[4]);
}

}  // namespace ringattn::sm90
