// SPDX-License-Identifier: Apache-2.0
// The combine kernel for decode steps whose keys are partitioned over several caches.
#include "base/cuda.hpp"
#include "kernels/decode/sm80/decode_common.cuh"
#include "kernels/decode/sm80/sm80_decode.hpp"

namespace ringattn::sm80 {

namespace {

constexpr int kMergeThreads = 128;

// A thread finishes four columns of a row.
template <class Element>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ DecodeMergeParams p) {
  const int columns = p.attention.head_dim_v / 4;
  const std::int64_t index = std::int64_t{blockIdx.x} * kMergeThreads + threadIdx.x;
  if (index >= p.attention.rows * p.attention.heads * columns) return;
  const int column_quad = static_cast<int>(index % columns);
  const int head = static_cast<int>(index / columns % p.attention.heads);
  const std::int64_t row = index / columns / p.attention.heads;
  const std::int64_t sequence = row / p.rows;
  const std::int64_t length = __ldg(p.lengths + sequence);
  const TileRange tiles =
      Visibility(p.attention.mask, length).tiles(length - p.rows + (row - sequence * p.rows), p.tiles);
  const int first = static_cast<int>(tiles.begin / kTilesPerKvSplit);
  const int splits = tiles.empty() ? 0 : static_cast<int>((tiles.end - 1) / kTilesPerKvSplit) + 1 - first;
  finish_columns<Element>(p.attention, row, head, column_quad, splits, [&](int i) {
    const int split = first + i;
    return partial_at(p.partitions[split % p.partition_count], p.partial_splits, p.attention, row,
                      std::int64_t{split} / p.partition_count, head);
  });
}

template <class Element>
void prepare_merge() {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, merge_kernel<Element>), "cudaFuncGetAttributes");
}

template <class Element>
void launch_merge(const DecodeMergeParams& params, Stream stream) {
  const std::int64_t threads = params.attention.rows * params.attention.heads * (params.attention.head_dim_v / 4);
  const auto blocks = static_cast<unsigned>((threads + kMergeThreads - 1) / kMergeThreads);
  merge_kernel<Element><<<blocks, kMergeThreads, 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_attention's merge of partitions");
}

}  // namespace

constinit const MergeLauncher merge_bf16{prepare_merge<__nv_bfloat16>, launch_merge<__nv_bfloat16>};
constinit const MergeLauncher merge_fp16{prepare_merge<__half>, launch_merge<__half>};

}  // namespace ringattn::sm80
