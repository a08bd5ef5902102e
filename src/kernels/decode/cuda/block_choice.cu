// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/attention/cuda/top_k_blocks.cuh"
#include "kernels/decode/cuda/block_choice.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kPoolThreads = 128;
constexpr int kScoreWarps = 8;
constexpr int kBlocksOfWarp = 2;
constexpr int kBlocksOfCta = kScoreWarps * kBlocksOfWarp;
constexpr int kQueryFloats = 4096;  // floats of mean queries in shared memory
constexpr int kMaxDimLanes = 18;    // elements of a key per lane: up to 576 dims

// Computes one element of a block's mean: `column` of its [kv_heads, head_dim].
template <class Element>
__device__ __forceinline__ void pool_column(const BlockChoice& p, std::int64_t s, std::int64_t block, int column) {
  const int dim = p.spec.head_dim;
  const std::int64_t within = column / dim * p.k.head_stride + column % dim;
  const int keys = p.spec.block_mask.key_block;
  const float sum = sum_of_rows(0.0F, keys, [&](std::int64_t i) {
    const std::int64_t key = block * keys + i;
    std::int64_t page = s;
    std::int64_t of_page = key;
    if (p.block_table.pages != nullptr) {
      page = p.block_table.pages[s * p.block_table.stride + key / p.k.page_size];
      of_page = key % p.k.page_size;
    }
    return number_at<Element>(p.k.data, page * p.k.page_stride + of_page * p.k.token_stride + within);
  });
  p.means[(s * p.blocks + block) * p.spec.kv_heads * dim + column] = mean_of_rows(sum, keys);
}

// A thread block computes some columns of one KV block's mean.
template <class Element>
__global__ void __launch_bounds__(kPoolThreads)
    pool_kernel(const __grid_constant__ BlockChoice p, std::int64_t first_sequence) {
  const std::int64_t s = first_sequence + blockIdx.y;
  const int column = static_cast<int>(blockIdx.z) * kPoolThreads + static_cast<int>(threadIdx.x);
  if (static_cast<int>(blockIdx.x) >= blocks_before_rows(p, p.lengths[s])) return;
  if (column < p.spec.kv_heads * p.spec.head_dim) pool_column<Element>(p, s, blockIdx.x, column);
}

// One element of the mean of a decode step's query rows for a query head.
template <class Element>
__device__ float mean_query(const BlockChoice& p, std::int64_t sequence, int head, int d) {
  const float sum = sum_of_rows(0.0F, p.rows, [&](std::int64_t i) {
    return number_at<Element>(p.q.data, (sequence * p.rows + i) * p.q.token_stride + head * p.q.head_stride + d);
  });
  return mean_of_rows(sum, p.rows);
}

// A thread block scores some KV blocks by the heads of one mask row, and each warp several of them.
template <class Element>
__global__ void __launch_bounds__(32 * kScoreWarps)
    score_kernel(const __grid_constant__ BlockChoice p, std::int64_t first_mask_row) {
  __shared__ float queries[kQueryFloats];
  const int mask_heads = p.spec.block_mask.heads;
  const std::int64_t mask_row = first_mask_row + blockIdx.y;
  const std::int64_t s = mask_row / mask_heads;
  const int mask_head = static_cast<int>(mask_row - s * mask_heads);
  const int length = p.lengths[s];
  const int blocks = blocks_before_rows(p, length);
  if (static_cast<int>(blockIdx.x) * kBlocksOfCta >= blocks) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = static_cast<int>(blockIdx.x) * kBlocksOfCta + static_cast<int>(threadIdx.x) / 32 * kBlocksOfWarp;
  const int dim = p.spec.head_dim;
  const int ratio = p.spec.heads / p.spec.kv_heads;
  const int kv_heads = p.spec.kv_heads / mask_heads;
  const int at_a_time = ratio < kQueryFloats / dim ? ratio : kQueryFloats / dim;
  if (static_cast<int>(blockIdx.x) == (blocks - 1) / kBlocksOfCta && fills_block(p, length)) {
    // The new block's mean, for the heads that are scored here. No other thread block reads it.
    for (int i = static_cast<int>(threadIdx.x); i < kv_heads * dim; i += 32 * kScoreWarps) {
      pool_column<Element>(p, s, blocks - 1, mask_head * kv_heads * dim + i);
    }
  }
  const MeanScore score{p.spec.softmax_scale};
  float scores[kBlocksOfWarp] = {};
  for (int kv_head = mask_head * kv_heads; kv_head < (mask_head + 1) * kv_heads; ++kv_head) {
    for (int done = 0; done < ratio; done += at_a_time) {
      const int heads = ratio - done < at_a_time ? ratio - done : at_a_time;
      __syncthreads();  // all threads are done with the previous queries
      for (int i = static_cast<int>(threadIdx.x); i < heads * dim; i += 32 * kScoreWarps) {
        queries[i] = mean_query<Element>(p, s, kv_head * ratio + done + i / dim, i % dim);
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kBlocksOfWarp; ++n) {
        if (first + n >= blocks) break;
        const float* const mean = p.means + ((s * p.blocks + first + n) * p.spec.kv_heads + kv_head) * dim;
        float key[kMaxDimLanes];
#pragma unroll
        for (int i = 0; i < kMaxDimLanes; ++i) {
          key[i] = i * 32 + lane < dim ? mean[i * 32 + lane] : 0.0F;
        }
        for (int head = 0; head < heads; ++head) {
          float sum = 0.0F;
#pragma unroll
          for (int i = 0; i < kMaxDimLanes; ++i) {
            if (i * 32 + lane < dim) sum = __fadd_rn(sum, __fmul_rn(queries[head * dim + i * 32 + lane], key[i]));
          }
          scores[n] = __fadd_rn(scores[n], score.of_head(sum_of_lanes(sum)));
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kBlocksOfWarp; ++n) {
    if (lane == 0 && first + n < blocks) p.scores[mask_row * p.blocks + first + n] = scores[n];
  }
}

// A thread block makes one row of the mask: the first block, and the best of the others.
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const __grid_constant__ BlockChoice p) {
  const std::int64_t mask_head = blockIdx.x;
  const int length = p.lengths[mask_head / p.spec.block_mask.heads];
  const int count = chosen_blocks(p, length);
  const float* const scores = p.scores + mask_head * p.blocks;
  if (threadIdx.x == 0) p.counts[mask_head] = count;
  choose_best([scores](int block) { return block == 0 ? kAlwaysTaken : order_of_score(scores[block]); },
              blocks_before_rows(p, length), 0, count, p.chosen + mask_head * p.count);
}

// Calls launch(first, count) for parts of `all` that fit into the y dimension of a grid.
template <class Launch>
void for_grids(std::int64_t all, Launch launch) {
  constexpr std::int64_t kMax = 65535;
  for (std::int64_t first = 0; first < all; first += kMax) {
    launch(first, static_cast<unsigned>(all - first < kMax ? all - first : kMax));
  }
}

template <class Kernel>
void load(Kernel kernel) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

}  // namespace

void pool_keys(const BlockChoice& choice, Stream stream) {
  check_block_choice(choice);
  for_dtype(choice.spec.dtype, [&]<class Element>(Element) {
    if (choice.sequences() == 0) return load(pool_kernel<Element>);
    const auto columns = static_cast<unsigned>(choice.spec.kv_heads * choice.spec.head_dim);
    for_grids(choice.sequences(), [&](std::int64_t first, unsigned count) {
      const dim3 grid(static_cast<unsigned>(choice.blocks), count, (columns + kPoolThreads - 1) / kPoolThreads);
      pool_kernel<Element><<<grid, kPoolThreads, 0, cuda_stream(stream)>>>(choice, first);
      check_cuda(cudaGetLastError(), "pooling keys");
    });
  });
}

void choose_blocks(const BlockChoice& choice, Stream stream) {
  check_block_choice(choice);
  for_dtype(choice.spec.dtype, [&]<class Element>(Element) {
    if (choice.sequences() == 0) {
      load(score_kernel<Element>);
      return load(choose_kernel);
    }
    const std::int64_t mask_heads = choice.sequences() * choice.spec.block_mask.heads;
    const auto ctas = static_cast<unsigned>((choice.blocks + kBlocksOfCta - 1) / kBlocksOfCta);
    for_grids(mask_heads, [&](std::int64_t first, unsigned count) {
      score_kernel<Element><<<dim3(ctas, count), 32 * kScoreWarps, 0, cuda_stream(stream)>>>(choice, first);
      check_cuda(cudaGetLastError(), "scoring blocks of keys");
    });
    choose_kernel<<<static_cast<unsigned>(mask_heads), kChooseThreads, 0, cuda_stream(stream)>>>(choice);
    check_cuda(cudaGetLastError(), "choosing blocks of keys");
  });
}

}  // namespace ringattn::cuda
