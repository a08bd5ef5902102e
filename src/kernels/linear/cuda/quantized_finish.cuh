// SPDX-License-Identifier: Apache-2.0
// Computes y from sums (linear.hpp): scales, bias, activation, gate and rounding. All kernels of quantized weights use
// it, so that y has the same bits wherever its sums were added up.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/cuda/ptx.cuh"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/quantized_params.hpp"

namespace ringattn::cuda {

template <class Sum>
using SumVector = std::conditional_t<std::is_same_v<Sum, float>, float4, int4>;

// Four adjacent columns of y, for any number of rows.
template <class Sum>
class ColumnFinish {
 public:
  static constexpr bool kInt8 = std::is_same_v<Sum, std::int32_t>;

  __device__ __forceinline__ ColumnFinish(const QuantizedOutput& out, int column) : column_(column) {
    const int count = out.columns - column;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool present = out.y != nullptr && m < out.matrices && i < count;
        const void* const bias = present ? out.bias[m] : nullptr;
        bias_[m][i] = out.dtype == Dtype::kBf16 ? load_bias<__nv_bfloat16>(bias, column + i)
                                                : load_bias<__half>(bias, column + i);
        if constexpr (kInt8) scale_[m][i] = present ? out.scales[m][column + i] : 0.0F;
      }
    }
  }

  // sums: of the gate and of up, or of the only matrix. row_scale: int8.
  __device__ __forceinline__ void write(const QuantizedOutput& out, int row, float row_scale,
                                        const SumVector<Sum> (&sums)[2]) const {
    const int count = out.columns - column_;
    const Sum gate[4] = {sums[0].x, sums[0].y, sums[0].z, sums[0].w};
    const Sum up[4] = {sums[1].x, sums[1].y, sums[1].z, sums[1].w};
    if (out.y == nullptr) {
      Sum* const to =
          static_cast<Sum*>(out.sums) + static_cast<std::int64_t>(row) * out.matrices * out.columns + column_;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < count) to[i] = gate[i];
        if (i < count && out.matrices == 2) to[out.columns + i] = up[i];
      }
      return;
    }
    float y[4];
    with_activation<false>(out.activation, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = activation(with_bias(gate[i], row_scale, 0, i));
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (out.matrices == 2) y[i] = __fmul_rn(y[i], with_bias(up[i], row_scale, 1, i));
    }
    const bool bf16 = out.dtype == Dtype::kBf16;
    const auto packed = [&](int i) {
      return bf16 ? MmaTraits<__nv_bfloat16>::pack(y[i], y[i + 1]) : MmaTraits<__half>::pack(y[i], y[i + 1]);
    };
    const uint2 words{packed(0), packed(2)};
    char* const to = out.y + row * out.y_stride + std::int64_t{2} * column_;
    if (count >= 4 && reinterpret_cast<std::uintptr_t>(to) % 8 == 0) {
      *reinterpret_cast<uint2*>(to) = words;
      return;
    }
    auto* const elements = reinterpret_cast<std::uint16_t*>(to);
    if (count > 0) elements[0] = static_cast<std::uint16_t>(words.x);
    if (count > 1) elements[1] = static_cast<std::uint16_t>(words.x >> 16);
    if (count > 2) elements[2] = static_cast<std::uint16_t>(words.y);
    if (count > 3) elements[3] = static_cast<std::uint16_t>(words.y >> 16);
  }

 private:
  __device__ __forceinline__ float with_bias(Sum sum, float row_scale, int m, int i) const {
    if constexpr (kInt8) {
      return __fmaf_rn(__fmul_rn(__int2float_rn(sum), row_scale), scale_[m][i], bias_[m][i]);
    } else {
      return __fadd_rn(sum, bias_[m][i]);
    }
  }

  int column_;
  float bias_[2][4];
  float scale_[2][4];  // int8
};

// Writes the rows [first_row, first_row + rows) of a tile by kThreads threads. load(row of the tile, sum of the row)
// returns four adjacent sums; the sums of the up matrix follow the `columns` sums of the gate matrix. row_scale(row of
// the tile): int8.
template <class Sum, int kThreads, class Load, class RowScale>
__device__ __forceinline__ void finish_tile(const QuantizedOutput& out, int first_row, int rows, int first_column,
                                            int columns, int thread, Load load, RowScale row_scale) {
  const int threads_of_row = columns / 4;
  const int at = thread % threads_of_row * 4;
  if (first_column + at >= out.columns) return;
  const ColumnFinish<Sum> finish(out, first_column + at);
  constexpr int kAtOnce = 4;  // rows whose scales and sums are loaded together
#pragma unroll 1
  for (int row = thread / threads_of_row; row < rows; row += kAtOnce * (kThreads / threads_of_row)) {
    float row_scales[kAtOnce];
    SumVector<Sum> sums[kAtOnce][2];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int r = min(row + i * (kThreads / threads_of_row), rows - 1);
      row_scales[i] = out.y != nullptr ? row_scale(r) : 1.0F;
      sums[i][0] = load(r, at);
      sums[i][1] = out.matrices == 2 ? load(r, columns + at) : SumVector<Sum>{};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int r = row + i * (kThreads / threads_of_row);
      if (r < rows) finish.write(out, first_row + r, row_scales[i], sums[i]);
    }
  }
}
// For fp32 sums, which have no scales of rows.
template <int kThreads, class Load>
__device__ __forceinline__ void finish_float_tile(const QuantizedOutput& out, int first_row, int rows, int first_column,
                                                  int columns, int thread, Load load) {
  finish_tile<float, kThreads>(out, first_row, rows, first_column, columns, thread, load, [](int) { return 1.0F; });
}

// Adds one, with release and acquire semantics for the device: data that the CTA's threads wrote before a barrier is
// visible to any thread that sees the new count.
__device__ __forceinline__ std::uint32_t count_arrival(std::uint32_t* counter) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Row stride, in words, of tiles of 128 sums in shared memory. 4 modulo 16: threads that write wgmma's or mma.sync's
// fragments, rows 2t and columns of eight, use all banks.
inline constexpr int kStagedRow = 132;

}  // namespace ringattn::cuda
