// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/cuda/device/merge_arithmetic.cuh"
#include "kernels/cuda/device/merge_state.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kWarps = 4;  // of a block, and each takes one row and head at a time

template <class Arithmetic>
__global__ void __launch_bounds__(32 * kWarps) merge_kernel(const __grid_constant__ MergeParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t n = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; n < p.rows * p.heads;
       n += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t row = n % p.rows;
    const std::int64_t head = n / p.rows;
    const StatePtrs state_ptrs(p.state, p.rows, p.heads, p.head_dim_v, row, head);
    const WholeRow<Arithmetic> before({p.state, p.rows, p.heads, p.head_dim_v, row, head}, p.offset_scale.base2);
    const WholeRow<Arithmetic> group({p.partial, p.rows, p.heads, p.head_dim_v, row, head}, p.offset_scale.base2);
    if (!group.any() && !before.current) continue;  // nothing changes
    const bool joins = before.any() && group.any();
    float softmax_offset = before.any() ? before.softmax_offset : group.softmax_offset;
    float sum = before.any() ? before.sum : group.sum;
    MergeStep step{};
    if (joins) {
      step = Arithmetic::merge(softmax_offset, sum, group.softmax_offset, group.sum, p.offset_scale.base2);
      softmax_offset = step.softmax_offset;
      sum = step.sum;
    }
    for (int column = lane; column < p.head_dim_v; column += 32) {
      const float output = before.any() ? before.output(column) : group.output(column);
      state_ptrs.merged[column] = joins ? Arithmetic::join(output, group.output(column), step) : output;
    }
    __syncwarp();  // everybody has read the stats
    if (lane == 0) {
      state_ptrs.stats[kMergedOffset] = softmax_offset;
      state_ptrs.stats[kMergedSum] = sum;
      state_ptrs.stats[kStateFlags] = kHasMerged;
    }
  }
}

template <class Arithmetic>
void launch_merge(const MergeParams& params, Stream stream) {
  constexpr std::int64_t kMostBlocks = 1 << 16;
  const std::int64_t blocks = (params.rows * params.heads + kWarps - 1) / kWarps;
  merge_kernel<Arithmetic>
      <<<static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks), 32 * kWarps, 0, cuda_stream(stream)>>>(
          params);
  check_cuda(cudaGetLastError(), "merge_state");
}

}  // namespace

void merge_tensor_state(const MergeParams& params, Stream stream) { launch_merge<TensorArithmetic>(params, stream); }
void merge_simt_state(const MergeParams& params, Stream stream) { launch_merge<SimtArithmetic>(params, stream); }

}  // namespace ringattn::cuda
