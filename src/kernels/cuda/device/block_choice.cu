// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/cuda.hpp"
#include "kernels/block_score.hpp"
#include "kernels/cuda/device/block_choice.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kPoolThreads = 128;
constexpr int kScoreWarps = 8;
constexpr int kBlocksOfWarp = 2;
constexpr int kBlocksOfCta = kScoreWarps * kBlocksOfWarp;
constexpr int kQueryFloats = 4096;  // mean queries in shared memory
constexpr int kMostDimLanes = 18;   // numbers of a key that a lane has: 576 dims
constexpr int kChooseThreads = 1024;
constexpr int kKept = 4;  // scores in registers of a thread

template <class Element>
__device__ float number_at(const void* data, std::int64_t index) {
  return static_cast<float>(static_cast<const Element*>(data)[index]);
}

// A number of a block's mean, `column` of its [kv_heads, head_dim].
template <class Element>
__device__ __forceinline__ void pool_column(const BlockChoice& p, std::int64_t s, std::int64_t block, int column) {
  const int dim = p.spec.head_dim;
  const std::int64_t within = column / dim * p.k.head_stride + column % dim;
  const int keys = p.spec.lists.key_block;
  float sum = 0.0F;
#pragma unroll 8
  for (int i = 0; i < keys; ++i) {
    const std::int64_t key = block * keys + i;
    std::int64_t page = s;
    std::int64_t of_page = key;
    if (p.block_table.pages != nullptr) {
      page = p.block_table.pages[s * p.block_table.stride + key / p.k.page_size];
      of_page = key % p.k.page_size;
    }
    sum = __fadd_rn(sum, number_at<Element>(p.k.data, page * p.k.page_stride + of_page * p.k.token_stride + within));
  }
  p.means[(s * p.blocks + block) * p.spec.kv_heads * dim + column] =
      __fmul_rn(sum, __fdiv_rn(1.0F, static_cast<float>(keys)));
}

// A block of threads has some columns of one block's mean.
template <class Element>
__global__ void __launch_bounds__(kPoolThreads) pool_kernel(const __grid_constant__ BlockChoice p) {
  const std::int64_t s = blockIdx.y;
  const int column = static_cast<int>(blockIdx.z) * kPoolThreads + static_cast<int>(threadIdx.x);
  if (static_cast<int>(blockIdx.x) >= blocks_before_rows(p, p.lengths[s])) return;
  if (column < p.spec.kv_heads * p.spec.head_dim) pool_column<Element>(p, s, blockIdx.x, column);
}

// The mean of a step's rows, one number of a query head.
template <class Element>
__device__ float mean_query(const BlockChoice& p, std::int64_t sequence, int head, int d) {
  float sum = 0.0F;
  for (int i = 0; i < p.rows; ++i) {
    const std::int64_t row = sequence * p.rows + i;
    sum = __fadd_rn(sum, number_at<Element>(p.q.data, row * p.q.token_stride + head * p.q.head_stride + d));
  }
  return __fmul_rn(sum, __fdiv_rn(1.0F, static_cast<float>(p.rows)));
}

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int half = kScoreLanes / 2; half > 0; half /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffU, x, half));
  return x;
}

// A block of threads scores some key blocks by one list's heads, a warp several of them.
template <class Element>
__global__ void __launch_bounds__(32 * kScoreWarps) score_kernel(const __grid_constant__ BlockChoice p) {
  __shared__ float queries[kQueryFloats];
  const int lists = p.spec.lists.heads;
  const std::int64_t s = blockIdx.y / static_cast<unsigned>(lists);
  const int list = static_cast<int>(blockIdx.y % static_cast<unsigned>(lists));
  const int length = p.lengths[s];
  const int blocks = blocks_before_rows(p, length);
  if (static_cast<int>(blockIdx.x) * kBlocksOfCta >= blocks) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = static_cast<int>(blockIdx.x) * kBlocksOfCta + static_cast<int>(threadIdx.x) / 32 * kBlocksOfWarp;
  const int dim = p.spec.head_dim;
  const int ratio = p.spec.heads / p.spec.kv_heads;
  const int kv_heads = p.spec.kv_heads / lists;
  const int at_a_time = ratio < kQueryFloats / dim ? ratio : kQueryFloats / dim;
  if (static_cast<int>(blockIdx.x) == (blocks - 1) / kBlocksOfCta && fills_block(p, length)) {
    // Of the heads that are scored here; nobody else reads these.
    for (int i = static_cast<int>(threadIdx.x); i < kv_heads * dim; i += 32 * kScoreWarps) {
      pool_column<Element>(p, s, blocks - 1, list * kv_heads * dim + i);
    }
  }
  const MeanScore score{p.spec.softmax_scale};
  float scores[kBlocksOfWarp] = {};
  for (int kv_head = list * kv_heads; kv_head < (list + 1) * kv_heads; ++kv_head) {
    for (int done = 0; done < ratio; done += at_a_time) {
      const int heads = ratio - done < at_a_time ? ratio - done : at_a_time;
      __syncthreads();  // everybody is done with the queries before
      for (int i = static_cast<int>(threadIdx.x); i < heads * dim; i += 32 * kScoreWarps) {
        queries[i] = mean_query<Element>(p, s, kv_head * ratio + done + i / dim, i % dim);
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kBlocksOfWarp; ++n) {
        if (first + n >= blocks) break;
        const float* const mean = p.means + ((s * p.blocks + first + n) * p.spec.kv_heads + kv_head) * dim;
        float key[kMostDimLanes];
#pragma unroll
        for (int i = 0; i < kMostDimLanes; ++i) {
          key[i] = i * 32 + lane < dim ? mean[i * 32 + lane] : 0.0F;
        }
        for (int head = 0; head < heads; ++head) {
          float sum = 0.0F;
#pragma unroll
          for (int i = 0; i < kMostDimLanes; ++i) {
            if (i * 32 + lane < dim) sum = __fadd_rn(sum, __fmul_rn(queries[head * dim + i * 32 + lane], key[i]));
          }
          scores[n] = __fadd_rn(scores[n], score.of_head(sum_of_lanes(sum)));
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kBlocksOfWarp; ++n) {
    if (lane == 0 && first + n < blocks) p.scores[blockIdx.y * p.blocks + first + n] = scores[n];
  }
}

// How many of the threads in front of this one say yes, and how many of all. By all threads of the block.
struct Ranks {
  int before, all;
};
__device__ __forceinline__ Ranks ranks_of(bool yes, int* of_warps) {
  const unsigned votes = __ballot_sync(0xffffffffU, yes);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncthreads();
  if (lane == 0) of_warps[warp] = __popc(votes);
  __syncthreads();
  const int own = of_warps[lane];  // there are as many warps as lanes
  const int before = __reduce_add_sync(0xffffffffU, lane < warp ? own : 0);
  return {before + __popc(votes & ((1U << lane) - 1U)), static_cast<int>(__reduce_add_sync(0xffffffffU, own))};
}

// The sum over all threads of the block. `of_warps` is another place than that of the sum before.
__device__ __forceinline__ int sum_of_block(int own, int* of_warps) {
  const int of_warp = static_cast<int>(__reduce_add_sync(0xffffffffU, own));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  return static_cast<int>(__reduce_add_sync(0xffffffffU, of_warps[threadIdx.x % 32]));
}

// A block of threads makes one list: the first block, and of the others the best. A thread has every
// kChooseThreads-th block's score, the first few of them in registers.
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const __grid_constant__ BlockChoice p) {
  static_assert(kChooseThreads == 32 * 32);
  __shared__ int of_warps[2][32];
  const std::int64_t list = blockIdx.x;
  const int length = p.lengths[list / p.spec.lists.heads];
  const int blocks = blocks_before_rows(p, length);
  const int count = chosen_blocks(p, length);
  const float* const scores = p.scores + list * p.blocks;
  std::int32_t* const to = p.chosen + list * p.count;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) p.counts[list] = count;
  if (count == blocks) {
    for (int i = thread; i < count; i += kChooseThreads) to[i] = i;
    return;
  }
  if (thread == 0) to[0] = 0;
  int left = count - 1;
  if (left == 0) return;
  std::uint32_t kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int block = 1 + thread + i * kChooseThreads;
    kept[i] = block < blocks ? order_of_score(scores[block]) : 0;
  }
  // Bit by bit, the left-th highest score; no score has the order 0.
  std::uint32_t limit = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit) {
    const std::uint32_t tried = limit | 1U << bit;
    int reach = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) reach += kept[i] >= tried ? 1 : 0;
#pragma unroll 1
    for (int block = 1 + thread + kKept * kChooseThreads; block < blocks; block += kChooseThreads) {
      reach += order_of_score(scores[block]) >= tried ? 1 : 0;
    }
    if (sum_of_block(reach, of_warps[bit & 1]) >= left) limit = tried;
  }
  // Those above it, and of its equals the first.
  int above = 0;
#pragma unroll 1
  for (int block = 1 + thread; block < blocks; block += kChooseThreads) {
    above += order_of_score(scores[block]) > limit ? 1 : 0;
  }
  left -= sum_of_block(above, of_warps[1]);
  int listed = 1;
  for (int first = 1; first < blocks; first += kChooseThreads) {
    const int i = first + thread;
    const std::uint32_t order = i < blocks ? order_of_score(scores[i]) : 0;
    const bool equal = i < blocks && order == limit;
    const Ranks equals = ranks_of(equal, of_warps[0]);
    const bool takes = i < blocks && (order > limit || (equal && equals.before < left));
    const Ranks taken = ranks_of(takes, of_warps[1]);
    if (takes) to[listed + taken.before] = i;
    left -= equals.all;
    listed += taken.all;
  }
}

template <class Kernel>
void load(Kernel kernel) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

template <class With>
void for_dtype(Dtype dtype, With with) {
  if (dtype == Dtype::kF32) return with(float{});
  if (dtype == Dtype::kF16) return with(__half{});
  with(__nv_bfloat16{});
}

}  // namespace

void pool_keys(const BlockChoice& choice, Stream stream) {
  check_block_choice(choice);
  for_dtype(choice.spec.dtype, [&]<class Element>(Element) {
    if (choice.sequences() == 0) return load(pool_kernel<Element>);
    const auto columns = static_cast<unsigned>(choice.spec.kv_heads * choice.spec.head_dim);
    const dim3 grid(static_cast<unsigned>(choice.blocks), static_cast<unsigned>(choice.sequences()),
                    (columns + kPoolThreads - 1) / kPoolThreads);
    pool_kernel<Element><<<grid, kPoolThreads, 0, cuda_stream(stream)>>>(choice);
    check_cuda(cudaGetLastError(), "pooling keys");
  });
}

void choose_blocks(const BlockChoice& choice, Stream stream) {
  check_block_choice(choice);
  for_dtype(choice.spec.dtype, [&]<class Element>(Element) {
    if (choice.sequences() == 0) {
      load(score_kernel<Element>);
      return load(choose_kernel);
    }
    const auto lists = static_cast<unsigned>(choice.sequences() * choice.spec.lists.heads);
    const auto ctas = static_cast<unsigned>((choice.blocks + kBlocksOfCta - 1) / kBlocksOfCta);
    score_kernel<Element><<<dim3(ctas, lists), 32 * kScoreWarps, 0, cuda_stream(stream)>>>(choice);
    check_cuda(cudaGetLastError(), "scoring blocks of keys");
    choose_kernel<<<lists, kChooseThreads, 0, cuda_stream(stream)>>>(choice);
    check_cuda(cudaGetLastError(), "choosing blocks of keys");
  });
}

}  // namespace ringattn::cuda
