// SPDX-License-Identifier: Apache-2.0
// Merges saved states (AttentionKernel::merge_state()) and exports them as (m, l, O).
#include "base/cuda.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/attention_state.cuh"

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

template <class Arithmetic>
__global__ void export_kernel(const __grid_constant__ ExportParams p) {
  for (std::int64_t row_head = blockIdx.x; row_head < p.rows * p.heads; row_head += gridDim.x) {
    const std::int64_t row = row_head / p.heads;
    const std::int64_t head = row_head % p.heads;
    const WholeRow<Arithmetic> whole({p.state, p.rows, p.heads, p.head_dim_v, row, head}, p.offset_scale.base2);
    if (threadIdx.x == 0) {
      p.m[row * p.m_token_stride + head * p.m_head_stride] = __fmul_rn(whole.softmax_offset, p.offset_scale.natural);
      p.l[row * p.l_token_stride + head * p.l_head_stride] = whole.sum;
    }
    float* o = p.o + row * p.o_token_stride + head * p.o_head_stride;
    for (int dim = static_cast<int>(threadIdx.x); dim < p.head_dim_v; dim += static_cast<int>(blockDim.x)) {
      o[dim] = whole.output(state_column(dim, p.head_dim_v));
    }
  }
}

template <class Arithmetic>
void launch_export(const ExportParams& params, Stream stream) {
  constexpr std::int64_t kMaxBlocks = 1 << 16;
  const std::int64_t rows = params.rows * params.heads;
  const auto blocks = static_cast<unsigned>(rows < kMaxBlocks ? rows : kMaxBlocks);
  export_kernel<Arithmetic><<<blocks, 64, 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "export_state");
}

}  // namespace

void merge_tensor_state(const MergeParams& params, Stream stream) { launch_merge<TensorArithmetic>(params, stream); }
void merge_simt_state(const MergeParams& params, Stream stream) { launch_merge<SimtArithmetic>(params, stream); }
void export_tensor_state(const ExportParams& params, Stream stream) { launch_export<TensorArithmetic>(params, stream); }
void export_simt_state(const ExportParams& params, Stream stream) { launch_export<SimtArithmetic>(params, stream); }

}  // namespace ringattn::cuda
