// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/attention/cuda/block_mask_choice.hpp"
#include "kernels/attention/cuda/block_mask_scores.cuh"
#include "kernels/attention/cuda/top_k_blocks.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kPoolThreads = 128;

// A thread block computes some columns of one block's mean.
template <class Element>
__global__ void __launch_bounds__(kPoolThreads) pool_kernel(const __grid_constant__ RowPooling p) {
  const int column = static_cast<int>(blockIdx.y) * kPoolThreads + static_cast<int>(threadIdx.x);
  const auto width = static_cast<int>(p.rows.heads * p.rows.dim);
  if (column >= width) return;
  const auto dim = static_cast<int>(p.rows.dim);
  const std::int64_t begin = query_tile_begin(p.position, p.block) + blockIdx.x * std::int64_t{p.block};
  const std::int64_t end = begin + p.block;
  // Positions of the block in the sequence, and those of them in this call's rows.
  const std::int64_t own_begin = begin > p.positions.begin ? begin : p.positions.begin;
  const std::int64_t own_end = end < p.positions.end ? end : p.positions.end;
  const std::int64_t here = own_begin > p.position ? own_begin : p.position;
  const std::int64_t rows_end = p.position + p.rows.tokens;
  const std::int64_t here_end = own_end < rows_end ? own_end : rows_end;
  float* const mean = p.means + (begin / p.block - p.first) * width + column;
  const std::int64_t at = (here - p.position) * p.rows.token_stride + column / dim * p.rows.head_stride + column % dim;
  const float sum = sum_of_rows(here > own_begin ? *mean : 0.0F, here_end - here, [&](std::int64_t i) {
    return number_at<Element>(p.rows.data, at + i * p.rows.token_stride);
  });
  *mean = here_end == own_end ? mean_of_rows(sum, own_end - own_begin) : sum;
}

template <class Scores>
__global__ void __launch_bounds__(Scores::kThreads) score_kernel(const __grid_constant__ BlockMaskChoice p) {
  extern __shared__ float4 shared[];
  if (!tile_is_wanted<Scores>(p)) return;
  Scores(p, shared).run();
}

// A thread block makes one row of the mask.
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const __grid_constant__ BlockMaskChoice p) {
  const std::int64_t query_block = blockIdx.x;
  const std::int64_t mask_head = blockIdx.y;
  const BlockCandidates of = p.candidates[query_block];
  if (of.count == 0) return;
  const float* const scores = p.scores + (mask_head * p.query_blocks + query_block) * p.key_blocks + of.begin;
  const int diagonal = of.diagonal - of.begin;
  choose_best([scores, diagonal](
                  int block) { return block == 0 || block == diagonal ? kAlwaysTaken : order_of_score(scores[block]); },
              of.end - of.begin, of.begin, of.count, p.listed + mask_head * p.entries + of.first);
}

unsigned ceil_div(std::int64_t a, int b) { return static_cast<unsigned>((a + b - 1) / b); }

template <class Scores>
void score_blocks(const BlockMaskChoice& choice, Stream stream) {
  check_cuda(cudaFuncSetAttribute(score_kernel<Scores>, cudaFuncAttributeMaxDynamicSharedMemorySize, Scores::kBytes),
             "cudaFuncSetAttribute");
  const dim3 tiles(ceil_div(choice.key_blocks, Scores::kTile), ceil_div(choice.query_blocks, Scores::kTile),
                   static_cast<unsigned>(choice.spec.block_mask.heads));
  score_kernel<Scores><<<tiles, Scores::kThreads, Scores::kBytes, cuda_stream(stream)>>>(choice);
  check_cuda(cudaGetLastError(), "scoring blocks of keys");
}

}  // namespace

void pool_rows(const RowPooling& pooling, Stream stream) {
  check_row_pooling(pooling);
  const TensorView& rows = pooling.rows;
  if (rows.tokens == 0) return;
  const std::int64_t begin = query_tile_begin(pooling.position, pooling.block);
  const dim3 grid(ceil_div(pooling.position + rows.tokens - begin, pooling.block),
                  ceil_div(rows.heads * rows.dim, kPoolThreads));
  for_dtype(rows.dtype, [&]<class Element>(Element) {
    pool_kernel<Element><<<grid, kPoolThreads, 0, cuda_stream(stream)>>>(pooling);
    check_cuda(cudaGetLastError(), "pooling rows");
  });
}

void choose_block_mask(const BlockMaskChoice& choice, Stream stream) {
  check_block_mask_choice(choice);
  if (choice.query_blocks == 0 || choice.key_blocks == 0) return;
  const auto mask_heads = static_cast<unsigned>(choice.spec.block_mask.heads);
  switch (choice.spec.head_dim) {
    case 2 * kScoreLanes:
      score_blocks<BlockMaskScores<2, true>>(choice, stream);
      break;
    case 4 * kScoreLanes:
      score_blocks<BlockMaskScores<4, true>>(choice, stream);
      break;
    default:
      score_blocks<BlockMaskScores<4, false>>(choice, stream);
  }
  choose_kernel<<<dim3(static_cast<unsigned>(choice.query_blocks), mask_heads), kChooseThreads, 0,
                  cuda_stream(stream)>>>(choice);
  check_cuda(cudaGetLastError(), "choosing blocks of keys");
}

}  // namespace ringattn::cuda
