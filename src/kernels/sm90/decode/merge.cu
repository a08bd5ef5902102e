// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/sm90/decode/finish.cuh"
#include "kernels/sm90/decode/merge.hpp"

namespace ringattn::sm90 {

namespace {

template <class Element_>
struct MergeConfig {
  using Element = Element_;
};

// A CTA merges one row of one head; a thread four of its columns.
template <class Element>
__global__ void merge_kernel(const __grid_constant__ MergeParams params) {
  const DecodeParams& p = params.step;
  const int row = static_cast<int>(blockIdx.x) / p.fold.heads;
  const int sequence = row / p.rows;
  const DecodePlace place{row, static_cast<int>(blockIdx.x) - row * p.fold.heads, row - sequence * p.rows};
  const int length = __ldg(p.lengths + sequence);
  const auto tiles =
      visibility_of(p, length).tiles(length - p.rows + place.of_sequence, TileSizes{kQueryTile, params.key_tile});
  const int begin = tiles.empty() ? 0 : tiles.begin / kGroupTiles;
  const int end = tiles.empty() ? 0 : (tiles.end - 1) / kGroupTiles + 1;
  const int share = static_cast<int>(threadIdx.x);
  const int floats = p.fold.head_dim_v + 4;
  write_merged<MergeConfig<Element>>(p, place, share, merge_groups(begin, end, [&](int group) {
                                       const int nth = group / params.shares;
                                       const float* const record =
                                           params.records[group - nth * params.shares] +
                                           ((row * p.record_groups + nth) * p.fold.heads + place.query_head) * floats;
                                       return PartialAt{reinterpret_cast<const float4*>(record) + share,
                                                        reinterpret_cast<const float2*>(record + p.fold.head_dim_v)};
                                     }));
}

auto kernel_of(Dtype dtype) { return dtype == Dtype::kBf16 ? merge_kernel<__nv_bfloat16> : merge_kernel<__half>; }

}  // namespace

void prepare_merge(Dtype dtype) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel_of(dtype)), "cudaFuncGetAttributes");
}

void launch_merge(const MergeParams& params, Dtype dtype, Stream stream) {
  const auto kernel = kernel_of(dtype);
  const auto ctas = static_cast<unsigned>(params.step.fold.rows * params.step.fold.heads);
  kernel<<<ctas, static_cast<unsigned>(params.step.fold.head_dim_v / 4), 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "merging groups");
}

}  // namespace ringattn::sm90
