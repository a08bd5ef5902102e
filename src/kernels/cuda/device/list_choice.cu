// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/cuda/device/best_blocks.cuh"
#include "kernels/cuda/device/list_choice.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kPoolThreads = 128;
// A warp scores so many blocks of queries by so many of keys.
constexpr int kQueriesOfWarp = 4;
constexpr int kKeysOfWarp = kSumsOfLanes;
constexpr int kQueryWarps = 4;
constexpr int kKeyWarps = 2;
constexpr int kScoreThreads = 32 * kQueryWarps * kKeyWarps;
constexpr int kQueriesOfCta = kQueryWarps * kQueriesOfWarp;
constexpr int kKeysOfCta = kKeyWarps * kKeysOfWarp;
constexpr int kDims = 128;  // of means that are in shared memory at a time

// A block of threads has some columns of one block's mean.
template <class Element>
__global__ void __launch_bounds__(kPoolThreads) pool_kernel(const __grid_constant__ RowPooling p) {
  const int column = static_cast<int>(blockIdx.y) * kPoolThreads + static_cast<int>(threadIdx.x);
  const auto width = static_cast<int>(p.rows.heads * p.rows.dim);
  if (column >= width) return;
  const auto dim = static_cast<int>(p.rows.dim);
  const std::int64_t begin = query_tile_begin(p.position, p.block) + blockIdx.x * std::int64_t{p.block};
  const std::int64_t end = begin + p.block;
  // Of the sequence, and of this piece.
  const std::int64_t own_begin = begin > p.positions.begin ? begin : p.positions.begin;
  const std::int64_t own_end = end < p.positions.end ? end : p.positions.end;
  const std::int64_t here = own_begin > p.position ? own_begin : p.position;
  const std::int64_t piece_end = p.position + p.rows.tokens;
  const std::int64_t here_end = own_end < piece_end ? own_end : piece_end;
  float* const mean = p.means + (begin / p.block - p.first) * width + column;
  const std::int64_t at = (here - p.position) * p.rows.token_stride + column / dim * p.rows.head_stride + column % dim;
  const float sum = sum_of_rows(here > own_begin ? *mean : 0.0F, here_end - here, [&](std::int64_t i) {
    return number_at<Element>(p.rows.data, at + i * p.rows.token_stride);
  });
  *mean = here_end == own_end ? mean_of_rows(sum, own_end - own_begin) : sum;
}

// Means [rows, kDims] of blocks first, first + 1, … of one head, and zeros behind the last block and the last dim,
// which change no sum. A block's numbers of all heads follow each other at `stride`.
template <int kRows>
__device__ __forceinline__ void fetch_means(float (&to)[kRows][kDims], const float* means, std::int64_t stride,
                                            std::int64_t first, std::int64_t blocks, int dims) {
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kDims; i += kScoreThreads) {
    const int row = i / kDims;
    const int d = i % kDims;
    to[row][d] = first + row < blocks && d < dims ? means[(first + row) * stride + d] : 0.0F;
  }
}

// A block of threads scores some blocks of queries and of keys by one list's heads.
__global__ void __launch_bounds__(kScoreThreads) score_kernel(const __grid_constant__ ListChoice p) {
  __shared__ float queries[kQueriesOfCta][kDims];
  __shared__ float keys[kKeysOfCta][kDims];
  const std::int64_t first_key = blockIdx.x * std::int64_t{kKeysOfCta};
  const std::int64_t first_query = blockIdx.y * std::int64_t{kQueriesOfCta};
  bool wanted = false;
  if (threadIdx.x < kQueriesOfCta && first_query + threadIdx.x < p.query_blocks) {
    const ListCandidates of = p.candidates[first_query + threadIdx.x];
    wanted = of.count < of.end - of.begin && of.begin < first_key + kKeysOfCta && of.end > first_key;
  }
  if (__syncthreads_or(wanted ? 1 : 0) == 0) return;
  const int list = static_cast<int>(blockIdx.z);
  const int heads = p.spec.heads / p.spec.lists.heads;
  const int ratio = p.spec.heads / p.spec.kv_heads;
  const int dim = p.spec.head_dim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int query = warp % kQueryWarps * kQueriesOfWarp;
  const int key = warp / kQueryWarps * kKeysOfWarp;
  const MeanScore score{p.spec.softmax_scale};
  float scores[kQueriesOfWarp] = {};
#pragma unroll 1
  for (int head = list * heads; head < (list + 1) * heads; ++head) {
    float sums[kQueriesOfWarp][kKeysOfWarp] = {};
#pragma unroll 1
    for (int d = 0; d < dim; d += kDims) {
      __syncthreads();  // everybody is done with the means before
      fetch_means(queries, p.q + head * dim + d, std::int64_t{p.spec.heads} * dim, first_query, p.query_blocks,
                  dim - d);
      fetch_means(keys, p.k + head / ratio * dim + d, std::int64_t{p.spec.kv_heads} * dim, first_key, p.key_blocks,
                  dim - d);
      __syncthreads();
#pragma unroll 1
      for (int i = lane; i < kDims && i - lane < dim - d; i += kScoreLanes) {
        float q[kQueriesOfWarp];
#pragma unroll
        for (int m = 0; m < kQueriesOfWarp; ++m) q[m] = queries[query + m][i];
#pragma unroll
        for (int n = 0; n < kKeysOfWarp; ++n) {
          const float k = keys[key + n][i];
#pragma unroll
          for (int m = 0; m < kQueriesOfWarp; ++m) sums[m][n] = __fadd_rn(sums[m][n], __fmul_rn(q[m], k));
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kQueriesOfWarp; ++m) {
      scores[m] = __fadd_rn(scores[m], score.of_head(sums_of_lanes(sums[m], lane)));
    }
  }
  const std::int64_t block = first_key + key + lane / 2;
#pragma unroll
  for (int m = 0; m < kQueriesOfWarp; ++m) {
    const std::int64_t row = first_query + query + m;
    if (lane % 2 == 0 && row < p.query_blocks && block < p.key_blocks) {
      p.scores[(list * p.query_blocks + row) * p.key_blocks + block] = scores[m];
    }
  }
}

// A block of threads makes one list.
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const __grid_constant__ ListChoice p) {
  const std::int64_t query_block = blockIdx.x;
  const std::int64_t list = blockIdx.y;
  const ListCandidates of = p.candidates[query_block];
  if (of.count == 0) return;
  const float* const scores = p.scores + (list * p.query_blocks + query_block) * p.key_blocks + of.begin;
  const int diagonal = of.diagonal - of.begin;
  choose_best([scores, diagonal](
                  int block) { return block == 0 || block == diagonal ? kAlwaysTaken : order_of_score(scores[block]); },
              of.end - of.begin, of.begin, of.count, p.listed + list * p.entries + of.first);
}

unsigned ceil_div(std::int64_t a, int b) { return static_cast<unsigned>((a + b - 1) / b); }

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

void choose_lists(const ListChoice& choice, Stream stream) {
  check_list_choice(choice);
  if (choice.query_blocks == 0 || choice.key_blocks == 0) return;
  const auto lists = static_cast<unsigned>(choice.spec.lists.heads);
  const dim3 tiles(ceil_div(choice.key_blocks, kKeysOfCta), ceil_div(choice.query_blocks, kQueriesOfCta), lists);
  score_kernel<<<tiles, kScoreThreads, 0, cuda_stream(stream)>>>(choice);
  check_cuda(cudaGetLastError(), "scoring blocks of keys");
  choose_kernel<<<dim3(static_cast<unsigned>(choice.query_blocks), lists), kChooseThreads, 0, cuda_stream(stream)>>>(
      choice);
  check_cuda(cudaGetLastError(), "choosing blocks of keys");
}

}  // namespace ringattn::cuda
