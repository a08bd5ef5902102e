// SPDX-License-Identifier: Apache-2.0
// The merge kernel of split-KV decode (decode_params.hpp): output rows and LSE from the partials of KV splits.
#include <cstdint>

#include "base/cuda.hpp"
#include "kernels/common/cuda/pdl_launch.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/decode/sm90/decode_common.cuh"
#include "kernels/decode/sm90/decode_params.hpp"

namespace ringattn::sm90 {

namespace {

template <class Element_>
struct MergeConfig {
  using Element = Element_;
};

constexpr int kMaxColumns = 512;
constexpr int kMergeBatch = 32;  // maximum of partials that are loaded at a time: a lane finds each

// At most the partials that a row may have.
__host__ __device__ int merge_batch(const MergeParams& params) {
  const auto splits = static_cast<int>(params.partial_splits) * params.partitions;
  return splits < kMergeBatch ? splits : kMergeBatch;
}

// Merges the splits [begin, end) of four columns of a row, number `share` of the row. partial_of(split) returns the
// address of a split's acc, which its stats follow after `columns` floats. Whole warps call it. The code is kept short:
// after a step that has read many keys it is in no cache, and fetching straight-line code takes longer than the loads.
template <class PartialOf>
__device__ __forceinline__ MergedColumns merge_split_partials(int begin, int end, int batch, int share, int columns,
                                                              PartialOf partial_of) {
  extern __shared__ float4 staged[];  // [batch][threads]
  constexpr unsigned kAll = 0xffffffffU;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float4* const own = staged + threadIdx.x;
  MergedColumns merged;
#pragma unroll 1
  for (int first = begin; first < end; first += batch) {
    const int count = end - first < batch ? end - first : batch;
    const float* const partial = partial_of(first + (lane < count ? lane : 0));
    const float2 stats = __ldcg(reinterpret_cast<const float2*>(partial + columns));
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const auto from = __shfl_sync(kAll, reinterpret_cast<std::uintptr_t>(partial), i);
      cuda::copy_16(cuda::shared_address(own + i * blockDim.x), reinterpret_cast<const float4*>(from) + share, true);
    }
    cuda::copy_commit();
    // Offsets move rarely: all splits up to the next one that moves the offset are handled at once.
    MergeStep step{};
    int done = 0;
    if (first == begin) {
      merged.softmax_offset = __shfl_sync(kAll, stats.x, 0);
      done = 1;
    }
#pragma unroll 1
    for (;;) {
      const MergeStep here = cuda::merge_partials(merged.softmax_offset, 0.0F, stats.x, stats.y, kOffsetLog2Factor);
      const unsigned moving = __ballot_sync(kAll, done <= lane && lane < count && here.rescales);
      const int next = moving == 0 ? count : __ffs(static_cast<int>(moving)) - 1;
      if (done <= lane && lane <= next) step = here;
      if (moving == 0) break;
      merged.softmax_offset = __shfl_sync(kAll, here.softmax_offset, next);
      done = next + 1;
    }
    cuda::copy_wait<0>();
#pragma unroll 2
    for (int i = 0; i < count; ++i) {
      const float4 x = own[i * blockDim.x];
      const float sum = __shfl_sync(kAll, stats.y, i);
      MergeStep merge{};
      merge.rescales = __shfl_sync(kAll, static_cast<int>(step.rescales), i) != 0;
      merge.state_scale = __shfl_sync(kAll, step.state_scale, i);
      merge.partial_scale = __shfl_sync(kAll, step.partial_scale, i);
      if (first + i == begin) {
        merged.outputs = x;
        merged.sum = sum;
        continue;
      }
      merged.sum =
          __fmaf_rn(sum, merge.partial_scale, merge.rescales ? __fmul_rn(merged.sum, merge.state_scale) : merged.sum);
      using Arithmetic = cuda::TensorArithmetic;
      merged.outputs = {Arithmetic::join(merged.outputs.x, x.x, merge), Arithmetic::join(merged.outputs.y, x.y, merge),
                        Arithmetic::join(merged.outputs.z, x.z, merge), Arithmetic::join(merged.outputs.w, x.w, merge)};
    }
  }
  return merged;
}

// A CTA merges one row of one head, and a thread four of its columns.
template <class Element>
__global__ void merge_kernel(const __grid_constant__ MergeParams params) {
  cuda::pdl_launch_dependents();
  cuda::pdl_wait();
  const DecodeRows& rows = params.rows;
  const int row = static_cast<int>(blockIdx.x);
  const int sequence = rows.per_sequence == 1 ? row : row / rows.per_sequence;
  const DecodeCoord coord{row, static_cast<int>(blockIdx.y), row - sequence * rows.per_sequence};
  const int length = __ldcg(rows.lengths + sequence);
  // A split counts as one tile of kv_split_keys keys.
  const auto splits =
      visibility_of(rows, length)
          .tiles(length - rows.per_sequence + coord.of_sequence, TileSizes{kQueryTile, params.kv_split_keys});
  if (params.whole != nullptr && splits.begin < splits.end && __ldcg(params.whole) != 0) return;
  const int columns = params.attention.head_dim_v;
  const int share = static_cast<int>(threadIdx.x);
  const bool present = share < columns / 4;
  const auto partial_of = [&](int split) {
    const int nth = params.partitions == 1 ? split : split / params.partitions;
    return params.partials[split - nth * params.partitions] +
           ((row * params.partial_splits + nth) * params.attention.heads + coord.query_head) * (columns + 4);
  };
  const auto merged =
      merge_split_partials(splits.begin, splits.end, merge_batch(params), present ? share : 0, columns, partial_of);
  if (present) write_merged<MergeConfig<Element>>(params.attention, coord, share, merged);
}

auto kernel_of(Dtype dtype) { return dtype == Dtype::kBf16 ? merge_kernel<__nv_bfloat16> : merge_kernel<__half>; }

}  // namespace

void prepare_merge(Dtype dtype) {
  check_cuda(cudaFuncSetAttribute(kernel_of(dtype), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kMergeBatch * kMaxColumns * int{sizeof(float)}),
             "cudaFuncSetAttribute");
}

void launch_merge(const MergeParams& params, Dtype dtype, Stream stream) {
  const int columns = params.attention.head_dim_v;
  const int threads = (columns / 4 + 31) / 32 * 32;
  cuda::PdlLaunch launch(static_cast<int>(params.attention.rows), threads,
                         merge_batch(params) * threads * int{sizeof(float4)}, stream);
  launch.config.gridDim.y = static_cast<unsigned>(params.attention.heads);
  check_cuda(cudaLaunchKernelEx(&launch.config, kernel_of(dtype), params), "merging splits");
}

}  // namespace ringattn::sm90
