// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/finish_params.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kFinishThreads = 256;

// Consecutive columns of a thread, loaded and stored at once.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Columns {
  T of[kWidth];
};
template <class T, int kWidth>
__device__ __forceinline__ Columns<T, kWidth> load_columns(const void* rows, std::int64_t at) {
  static_assert(sizeof(T) == 4 && (kWidth == 1 || kWidth == 4));
  Columns<T, kWidth> columns;
  const auto* const from = static_cast<const T*>(rows) + at;
  if constexpr (kWidth == 1) {
    columns.of[0] = __ldcs(from);
  } else {
    const uint4 words = __ldcs(reinterpret_cast<const uint4*>(from));
    memcpy(columns.of, &words, sizeof words);
  }
  return columns;
}

// The sum of a node: its own, or its children's sums added. Sums of leaves without elements are −0, or are left out by
// their kernels: x + (−0) is x.
template <int kNode, int kWidth, class Params>
__device__ __forceinline__ Columns<float, kWidth> node_sum(const Params& p, int node, std::int64_t at) {
  if (p.sums[node] != nullptr) return load_columns<float, kWidth>(p.sums[node], at);
  Columns<float, kWidth> sum;
  if constexpr (kNode < kLinearLeaves) {
    sum = node_sum<2 * kNode, kWidth>(p, 2 * node, at);
    const auto right = node_sum<2 * kNode, kWidth>(p, 2 * node + 1, at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum.of[i] = __fadd_rn(sum.of[i], right.of[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum.of[i] = -0.0F;  // a leaf without tokens (LinearSumTask)
  }
  return sum;
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

template <class Element, bool kIntegers, int kWidth>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ FinishParams p) {
  const std::int64_t column = (std::int64_t{blockIdx.x} * kFinishThreads + threadIdx.x) * kWidth;
  if (column >= p.columns) return;
  for (std::int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    // z of a matrix.
    const auto biased = [&](int matrix) {
      const std::int64_t at = row * p.sum_columns + matrix * p.columns + column;
      Columns<float, kWidth> z;
      if constexpr (kIntegers) {
        std::int32_t sum[kWidth] = {};
        for (int part = 0; part < kLinearNodes && p.sums[part] != nullptr; ++part) {
          const auto more = load_columns<std::int32_t, kWidth>(p.sums[part], at);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sum[i] += more.of[i];
        }
        const float scale = row_scale(p, row);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          z.of[i] = __fmaf_rn(__fmul_rn(static_cast<float>(sum[i]), scale), p.scales[matrix][column + i],
                              load_bias<Element>(p.bias[matrix], column + i));
        }
      } else {
        z = node_sum<1, kWidth>(p, 1, at);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          z.of[i] = __fadd_rn(z.of[i], load_bias<Element>(p.bias[matrix], column + i));
        }
      }
      return z;
    };
    const Columns<float, kWidth> z = biased(0);
    Columns<float, kWidth> y = z;
    with_activation<false>(p.activation, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) y.of[i] = activation(z.of[i]);
    });
    if (p.gated) {
      const Columns<float, kWidth> up = biased(1);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) y.of[i] = __fmul_rn(y.of[i], up.of[i]);
    }
    Columns<StoredElement<Element>, kWidth> rounded;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) rounded.of[i] = round_element<Element>(y.of[i]);
    auto* const to = static_cast<StoredElement<Element>*>(p.y) + row * p.y_stride + column;
    *reinterpret_cast<Columns<StoredElement<Element>, kWidth>*>(to) = rounded;
  }
}

__global__ void __launch_bounds__(kFinishThreads) node_sum_kernel(const __grid_constant__ NodeSumParams p) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kFinishThreads + threadIdx.x;
  if (at < p.count) p.sum[at] = node_sum<1, 1>(p, 1, at).of[0];
}

constexpr int kFinishColumns = 4;  // columns of a thread, if all rows are aligned

bool can_be_wide(const FinishParams& p, std::size_t element_bytes) {
  const auto is_aligned = [](const void* data, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
  };
  return p.columns % kFinishColumns == 0 && p.y_stride % kFinishColumns == 0 &&
         is_aligned(p.y, kFinishColumns * element_bytes) && std::ranges::all_of(p.sums, [&](const void* sums) {
           return is_aligned(sums, kFinishColumns * sizeof(float));
         });
}

template <class Element, bool kIntegers>
void launch_finish_of(const FinishParams& p, Stream stream) {
  constexpr std::int64_t kMaxGridRows = 32768;
  const auto launch = [&](auto* kernel, std::int64_t width) {
    const std::int64_t columns = kFinishThreads * width;
    const dim3 grid(static_cast<unsigned>((p.columns + columns - 1) / columns),
                    static_cast<unsigned>(std::min(p.rows, kMaxGridRows)));
    kernel<<<grid, kFinishThreads, 0, cuda_stream(stream)>>>(p);
  };
  if (can_be_wide(p, sizeof(StoredElement<Element>))) {
    launch(finish_kernel<Element, kIntegers, kFinishColumns>, kFinishColumns);
  } else {
    launch(finish_kernel<Element, kIntegers, 1>, 1);
  }
  check_cuda(cudaGetLastError(), "finish of a linear layer");
}

template <class Element>
void launch_finish_of(const FinishParams& p, Stream stream) {
  if constexpr (!std::is_same_v<Element, float>) {
    if (p.integers) return launch_finish_of<Element, true>(p, stream);
  }
  launch_finish_of<Element, false>(p, stream);
}

template <class Element>
void load_finish() {
  load_kernel(finish_kernel<Element, false, 1>);
  load_kernel(finish_kernel<Element, false, kFinishColumns>);
  if constexpr (!std::is_same_v<Element, float>) {
    load_kernel(finish_kernel<Element, true, 1>);
    load_kernel(finish_kernel<Element, true, kFinishColumns>);
  }
}

}  // namespace

void prepare_finish() {
  load_finish<__nv_bfloat16>();
  load_finish<__half>();
  load_finish<float>();
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
