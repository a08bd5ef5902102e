// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/attention/cuda/export_state.hpp"
#include "kernels/attention/cuda/merge_arithmetic.cuh"

namespace ringattn::cuda {

namespace {

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

void export_tensor_state(const ExportParams& params, Stream stream) { launch_export<TensorArithmetic>(params, stream); }
void export_simt_state(const ExportParams& params, Stream stream) { launch_export<SimtArithmetic>(params, stream); }

}  // namespace ringattn::cuda
