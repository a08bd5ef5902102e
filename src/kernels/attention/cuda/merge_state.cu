// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/attention/cuda/merge_arithmetic.cuh"
#include "kernels/attention/cuda/merge_state.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kWarps = 4;  // per thread block; each warp merges one (row, head) at a time

template <class Arithmetic>
__global__ void __launch_bounds__(32 * kWarps) merge_kernel(const __grid_constant__ MergeParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t row_head = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row_head < p.rows * p.heads;
       row_head += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t row = row_head % p.rows;
    const std::int64_t head = row_head / p.rows;
    const StatePtrs state_ptrs(p.state, p.rows, p.heads, p.head_dim_v, row, head);
    const WholeRow<Arithmetic> before({p.state, p.rows, p.heads, p.head_dim_v, row, head}, p.offset_scale.base2);
    const WholeRow<Arithmetic> partial({p.partial, p.rows, p.heads, p.head_dim_v, row, head}, p.offset_scale.base2);
    if (!partial.any() && !before.current) continue;  // nothing changes
    const bool merges = before.any() && partial.any();
    float softmax_offset = before.any() ? before.softmax_offset : partial.softmax_offset;
    float sum = before.any() ? before.sum : partial.sum;
    MergeStep step{};
    if (merges) {
      step = Arithmetic::merge(softmax_offset, sum, partial.softmax_offset, partial.sum, p.offset_scale.base2);
      softmax_offset = step.softmax_offset;
      sum = step.sum;
    }
    for (int column = lane; column < p.head_dim_v; column += 32) {
      const float output = before.any() ? before.output(column) : partial.output(column);
      state_ptrs.merged[column] = merges ? Arithmetic::join(output, partial.output(column), step) : output;
    }
    __syncwarp();  // all lanes have read the stats
    if (lane == 0) {
      state_ptrs.stats[kMergedOffset] = softmax_offset;
      state_ptrs.stats[kMergedSum] = sum;
      state_ptrs.stats[kStateFlags] = kHasMerged;
    }
  }
}

template <class Arithmetic>
void launch_merge(const MergeParams& params, Stream stream) {
  constexpr std::int64_t kMaxBlocks = 1 << 16;
  const std::int64_t blocks = (params.rows * params.heads + kWarps - 1) / kWarps;
  merge_kernel<Arithmetic>
      <<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), 32 * kWarps, 0, cuda_stream(stream)>>>(
          params);
  check_cuda(cudaGetLastError(), "merge_state");
}

}  // namespace

void merge_tensor_state(const MergeParams& params, Stream stream) { launch_merge<TensorArithmetic>(params, stream); }
void merge_simt_state(const MergeParams& params, Stream stream) { launch_merge<SimtArithmetic>(params, stream); }

}  // namespace ringattn::cuda
