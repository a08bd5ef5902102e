// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/finish_params.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kFinishThreads = 256;

// The sum of a node: as it is, or its children's sums added. Sums of leaves without elements are −0, or are left out by
// their kernels: x + (−0) is x.
template <int kNode, class Params>
__device__ __forceinline__ float node_sum(const Params& p, int node, std::int64_t at) {
  const auto* const sums = static_cast<const float*>(p.sums[node]);
  if (sums != nullptr) return __ldcs(sums + at);
  if constexpr (kNode < kLinearLeaves) {
    return __fadd_rn(node_sum<2 * kNode>(p, 2 * node, at), node_sum<2 * kNode>(p, 2 * node + 1, at));
  }
  return -0.0F;  // a leaf without tokens (LinearSumTask)
}

// s of a row (linear.hpp).
__device__ __forceinline__ float row_scale(const FinishParams& p, std::int64_t row) {
  float most = 0.0F;
  bool is_nan = false;
  for (int part = 0; part < p.absmax_parts; ++part) {
    const float value = p.absmax[part * p.absmax_stride + row];
    is_nan |= isnan(value);
    most = fmaxf(most, value);
  }
  if (is_nan) return NAN;
  const float scale = __fdiv_rn(most, 127.0F);
  return scale > 0.0F ? scale : 1.0F;
}

template <class Element, bool kIntegers>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ FinishParams p) {
  const std::int64_t column = std::int64_t{blockIdx.x} * kFinishThreads + threadIdx.x;
  if (column >= p.columns) return;
  for (std::int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    // z of a matrix.
    const auto biased = [&](int matrix) {
      const std::int64_t at = row * p.sum_columns + matrix * p.columns + column;
      const float bias = load_bias<Element>(p.bias[matrix], column);
      if constexpr (kIntegers) {
        std::int32_t sum = 0;
        for (int i = 0; i < kLinearNodes && p.sums[i] != nullptr; ++i) {
          sum += __ldcs(static_cast<const std::int32_t*>(p.sums[i]) + at);
        }
        return __fmaf_rn(__fmul_rn(static_cast<float>(sum), row_scale(p, row)), p.scales[matrix][column], bias);
      } else {
        return __fadd_rn(node_sum<1>(p, 1, at), bias);
      }
    };
    const float z = biased(0);
    float y = z;
    with_activation<false>(p.activation, [&](auto activation) { y = activation(z); });
    if (p.gated) y = __fmul_rn(y, biased(1));
    static_cast<StoredElement<Element>*>(p.y)[row * p.y_stride + column] = round_element<Element>(y);
  }
}

__global__ void __launch_bounds__(kFinishThreads) node_sum_kernel(const __grid_constant__ NodeSumParams p) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kFinishThreads + threadIdx.x;
  if (at < p.count) p.sum[at] = node_sum<1>(p, 1, at);
}

template <class Element>
void launch_finish_of(const FinishParams& p, Stream stream) {
  constexpr std::int64_t kMaxGridRows = 32768;
  const dim3 grid(static_cast<unsigned>((p.columns + kFinishThreads - 1) / kFinishThreads),
                  static_cast<unsigned>(std::min(p.rows, kMaxGridRows)));
  auto* kernel = finish_kernel<Element, false>;
  if constexpr (!std::is_same_v<Element, float>) {
    if (p.integers) kernel = finish_kernel<Element, true>;
  }
  kernel<<<grid, kFinishThreads, 0, cuda_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), "finish of a linear layer");
}

}  // namespace

void prepare_finish() {
  load_kernel(finish_kernel<__nv_bfloat16, false>);
  load_kernel(finish_kernel<__nv_bfloat16, true>);
  load_kernel(finish_kernel<__half, false>);
  load_kernel(finish_kernel<__half, true>);
  load_kernel(finish_kernel<float, false>);
  load_kernel(node_sum_kernel);
}

void launch_node_sum(const NodeSumParams& params, Stream stream) {
  if (params.count == 0) return;
  const auto blocks = static_cast<unsigned>((params.count + kFinishThreads - 1) / kFinishThreads);
  node_sum_kernel<<<blocks, kFinishThreads, 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sum of gradients");
}

void launch_finish(const FinishParams& params, Stream stream) {
  if (params.dtype == Dtype::kF32) return launch_finish_of<float>(params, stream);
  if (params.dtype == Dtype::kBf16) return launch_finish_of<__nv_bfloat16>(params, stream);
  launch_finish_of<__half>(params, stream);
}

}  // namespace ringattn::cuda
