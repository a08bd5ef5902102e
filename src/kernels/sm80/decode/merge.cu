// SPDX-License-Identifier: Apache-2.0
// The end of a step whose keys were dealt to several shares.
#include "base/cuda.hpp"
#include "kernels/sm80/decode/decode.hpp"
#include "kernels/sm80/decode/finish.cuh"

namespace ringattn::sm80 {

namespace {

constexpr int kThreads = 128;

// A thread finishes a share of a row's columns: four of them.
template <class Element>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ DecodeMergeParams p) {
  const int columns = p.fold.head_dim_v / 4;
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.fold.rows * p.fold.heads * columns) return;
  const int share = static_cast<int>(index % columns);
  const int head = static_cast<int>(index / columns % p.fold.heads);
  const std::int64_t row = index / columns / p.fold.heads;
  const std::int64_t sequence = row / p.rows;
  const std::int64_t length = __ldg(p.lengths + sequence);
  const TileRange tiles = Visibility(p.fold.mask, length).tiles(length - p.rows + (row - sequence * p.rows), p.tiles);
  const int first = static_cast<int>(tiles.begin / kGroupTiles);
  const int groups = tiles.empty() ? 0 : static_cast<int>((tiles.end - 1) / kGroupTiles) + 1 - first;
  finish_share<Element>(p.fold, row, head, share, groups, [&](int i) {
    const int group = first + i;
    return record_at(p.shares[group % p.share_count], p.record_groups, p.fold, row, std::int64_t{group} / p.share_count,
                     head);
  });
}

template <class Element>
void prepare_merge() {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, merge_kernel<Element>), "cudaFuncGetAttributes");
}

template <class Element>
void launch_merge(const DecodeMergeParams& params, Stream stream) {
  const std::int64_t threads = params.fold.rows * params.fold.heads * (params.fold.head_dim_v / 4);
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  merge_kernel<Element><<<blocks, kThreads, 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_fold's merge of shares");
}

}  // namespace

constinit const MergeLauncher merge_bf16{prepare_merge<__nv_bfloat16>, launch_merge<__nv_bfloat16>};
constinit const MergeLauncher merge_fp16{prepare_merge<__half>, launch_merge<__half>};

}  // namespace ringattn::sm80
