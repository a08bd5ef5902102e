// SPDX-License-Identifier: Apache-2.0
// Linear layers in fp32 for few rows, which take about as long as reading W. A warp sums one split or leaf of 16
// columns of sums; a lane has one column, for half of the rows. The warps of a CTA have the splits or leaves of the
// same columns, and add their sums in shared memory. A warp's pipeline is its own: a stage has 32 elements of K of its
// rows of W and of x, in panels (panels.hpp) whose rows are 32 fp32 elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/linear_gemm.hpp"

namespace ringattn::cuda {

inline constexpr int kSimtFewRows = 32;

namespace {

constexpr int kFewSums = 16;     // columns of sums of a CTA; gated: half of them of each matrix
constexpr int kFewDepth = 32;    // elements of K of a stage
constexpr int kMaxFewWarps = 8;  // also the number of leaves
constexpr int kMaxFewStages = 8;
constexpr int kFewShared = 36 * 1024;  // wanted, so that six CTAs run on a multiprocessor of Hopper at a time

struct SimtFewRowsParams {
  LinearGemm gemm;
  std::int32_t stages;
};

constexpr int few_stage_bytes(int rows) { return (kFewSums + rows) * kPanelRowBytes; }
constexpr int few_totals_bytes(int rows) { return rows * kFewSums * static_cast<int>(sizeof(float)); }
constexpr int few_shared_bytes(int rows, int warps, int stages) {
  return warps * stages * few_stage_bytes(rows) + few_totals_bytes(rows);
}
constexpr int few_stages(int rows, int warps) {
  return std::clamp((kFewShared - few_totals_bytes(rows)) / (warps * few_stage_bytes(rows)), 2, kMaxFewStages);
}
static_assert(few_shared_bytes(kSimtFewRows, kMaxFewWarps, 2) <= 99 * 1024);

// copy_wait() for a number that is not a compile-time constant.
__device__ __forceinline__ void wait_for_few(int pending) {
  switch (pending) {
    case 1:
      return copy_wait<1>();
    case 2:
      return copy_wait<2>();
    case 3:
      return copy_wait<3>();
    case 4:
      return copy_wait<4>();
    case 5:
      return copy_wait<5>();
    case 6:
      return copy_wait<6>();
    default:
      return copy_wait<0>();
  }
}

// Copies a chunk of 4 elements of a row, or the `left` elements that exist.
__device__ __forceinline__ void copy_elements(std::uint32_t to, const char* from, int left) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < left) copy_4(to + static_cast<std::uint32_t>(4 * i), from + 4 * i, true);
  }
}

template <int kRows>
__global__ void __launch_bounds__(kMaxFewWarps * 32, 1)
    simt_few_rows_kernel(const __grid_constant__ SimtFewRowsParams p) {
  extern __shared__ __align__(128) float few_shared[];
  const LinearGemm& gemm = p.gemm;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int matrices = gemm.gated ? 2 : 1;
  const int columns = kFewSums / matrices;  // of y
  const int first_column = static_cast<int>(blockIdx.x) * columns;
  const int stage_floats = few_stage_bytes(kRows) / 4;
  float* const own = few_shared + warp * p.stages * stage_floats;
  float* const totals = few_shared + warps * p.stages * stage_floats;  // [kRows][kFewSums]
  const std::uint32_t stages = shared_address(own);
  const int chunk = lane % 8;  // of 4 elements, which this lane copies
  // A single row is summed twice.
  constexpr int kOwnRows = kRows == 1 ? 1 : kRows / 2;
  const int own_column = lane % kFewSums, own_row = kRows == 1 ? 0 : lane / kFewSums * kOwnRows;
  bool aligned = RowsOf{gemm.x, gemm.x_stride}.aligned() && RowsOf{gemm.weights[0], gemm.weight_strides[0]}.aligned();
  if (gemm.gated) aligned = aligned && RowsOf{gemm.weights[1], gemm.weight_strides[1]}.aligned();

  for (int round = 0; round < gemm.chains.count; round += warps) {
    const int chain = round + warp;
    if (chain < gemm.chains.count) {
      const int begin = gemm.chains.begin(chain), end = gemm.chains.end(chain);
      const int panels = (end - begin + kFewDepth - 1) / kFewDepth;
      // The lanes copy four rows at a time, eight chunks of each.
      const auto copy_chunks = [&](int panel, int stage, auto copy_chunk) {
        const std::uint32_t to = stages + static_cast<std::uint32_t>(stage * few_stage_bytes(kRows));
        const std::int64_t offset = (begin + panel * kFewDepth + chunk * 4) * std::int64_t{4};
#pragma unroll
        for (int row = 0; row < kFewSums; row += 4) {
          const int matrix = row < columns ? 0 : 1;
          const int column = min(first_column + row + lane / 8 - matrix * columns, gemm.columns - 1);
          copy_chunk(to + swizzled(row + lane / 8, chunk),
                     gemm.weights[matrix] + column * gemm.weight_strides[matrix] + offset);
        }
#pragma unroll
        for (int row = 0; row < kRows; row += 4) {
          if (row + lane / 8 >= kRows) break;
          copy_chunk(to + static_cast<std::uint32_t>((kFewSums + row + lane / 8) * kPanelRowBytes + chunk * 16),
                     gemm.x + min(row + lane / 8, gemm.rows - 1) * gemm.x_stride + offset);
        }
      };
      const auto copy = [&](int panel, int stage) {
        const int left = end - begin - panel * kFewDepth;
        if (aligned && left >= kFewDepth) {
          copy_chunks(panel, stage, [](std::uint32_t to, const char* from) { copy_16(to, from, true); });
        } else if (left > 0) {
          copy_chunks(panel, stage,
                      [&](std::uint32_t to, const char* from) { copy_elements(to, from, left - chunk * 4); });
        }
        copy_commit();  // also past the last panel, because copy_wait() counts groups
      };
      for (int panel = 0; panel < p.stages - 1; ++panel) copy(panel, panel);
      float sums[kOwnRows];
#pragma unroll
      for (int row = 0; row < kOwnRows; ++row) sums[row] = begin == end ? -0.0F : 0.0F;  // an empty leaf is left out
      int used = 0;
      int filled = p.stages - 1;
      for (int panel = 0; panel < panels; ++panel) {
        wait_for_few(p.stages - 2);
        __syncwarp();  // the panel has arrived, and all lanes are done with the previous one, whose stage is filled
                       // next
        copy(panel + p.stages - 1, filled);
        filled = filled + 1 == p.stages ? 0 : filled + 1;
        const float* const weights = own + used * stage_floats;
        const float* const rows = weights + (kFewSums + own_row) * kFewDepth;
        used = used + 1 == p.stages ? 0 : used + 1;
        const int count = end - begin - panel * kFewDepth;
        if (count >= kFewDepth) {
#pragma unroll
          for (int four = 0; four < kFewDepth / 4; ++four) {
            const float4 w = *reinterpret_cast<const float4*>(weights + swizzled(own_column, four) / 4);
#pragma unroll
            for (int row = 0; row < kOwnRows; ++row) {
              const float4 a = *reinterpret_cast<const float4*>(rows + row * kFewDepth + four * 4);
              sums[row] = __fmaf_rn(a.x, w.x, sums[row]);
              sums[row] = __fmaf_rn(a.y, w.y, sums[row]);
              sums[row] = __fmaf_rn(a.z, w.z, sums[row]);
              sums[row] = __fmaf_rn(a.w, w.w, sums[row]);
            }
          }
        } else {
          for (int k = 0; k < count; ++k) {
            const float w = weights[swizzled(own_column, k / 4) / 4 + k % 4];
#pragma unroll
            for (int row = 0; row < kOwnRows; ++row) sums[row] = __fmaf_rn(rows[row * kFewDepth + k], w, sums[row]);
          }
        }
      }
      copy_wait<0>();
      __syncwarp();  // sums overwrite the stages
#pragma unroll
      for (int row = 0; row < kOwnRows; ++row) own[(own_row + row) * kFewSums + own_column] = sums[row];
    }
    __syncthreads();
    // Adds the sums of the round's splits to the total, or leaves by the tree.
    for (int at = static_cast<int>(threadIdx.x); at < kRows * kFewSums; at += static_cast<int>(blockDim.x)) {
      const auto sum_of = [&](int of) {
        return round + of < gemm.chains.count && of < warps ? few_shared[of * p.stages * stage_floats + at] : -0.0F;
      };
      if (gemm.chains.leaves) {
        const auto pair = [&](int of) { return __fadd_rn(sum_of(of), sum_of(of + 1)); };
        totals[at] = __fadd_rn(__fadd_rn(pair(0), pair(2)), __fadd_rn(pair(4), pair(6)));
      } else {
        float total = round == 0 ? -0.0F : totals[at];
        for (int of = 0; of < warps; ++of) total = __fadd_rn(total, sum_of(of));
        totals[at] = total;
      }
    }
    __syncthreads();  // stages are filled anew, and totals are read
  }

  with_activation<false>(gemm.activation, [&](auto activation) {
    for (int at = static_cast<int>(threadIdx.x); at < kRows * columns; at += static_cast<int>(blockDim.x)) {
      const int row = at / columns, of = at % columns, column = first_column + of;
      if (row >= gemm.rows || column >= gemm.columns) continue;
      const float* const sums = totals + row * kFewSums + of;
      float y = activation(__fadd_rn(sums[0], load_bias<float>(gemm.bias[0], column)));
      if (gemm.gated) y = __fmul_rn(y, __fadd_rn(sums[columns], load_bias<float>(gemm.bias[1], column)));
      reinterpret_cast<float*>(gemm.out + row * gemm.out_stride)[column] = y;
    }
  });
}

// Calls visit with the number of rows that the kernel for `rows` rows is compiled for.
template <class Visit>
void with_few_rows(int rows, Visit visit) {
  if (rows <= 1) return visit(std::integral_constant<int, 1>{});
  if (rows <= 2) return visit(std::integral_constant<int, 2>{});
  if (rows <= 4) return visit(std::integral_constant<int, 4>{});
  if (rows <= 8) return visit(std::integral_constant<int, 8>{});
  if (rows <= 16) return visit(std::integral_constant<int, 16>{});
  visit(std::integral_constant<int, 32>{});
}

void prepare_simt_few_rows() {
  for (int rows = 1; rows <= kSimtFewRows; rows *= 2) {
    with_few_rows(rows, [](auto compiled) {
      constexpr int kRows = decltype(compiled)::value;
      int bytes = 0;
      for (int warps = 1; warps <= kMaxFewWarps; ++warps) {
        bytes = std::max(bytes, few_shared_bytes(kRows, warps, few_stages(kRows, warps)));
      }
      check_cuda(cudaFuncSetAttribute(simt_few_rows_kernel<kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "cudaFuncSetAttribute");
    });
  }
}

void launch_simt_few_rows(const LinearGemm& gemm, Stream stream) {
  with_few_rows(gemm.rows, [&](auto compiled) {
    constexpr int kRows = decltype(compiled)::value;
    const int warps = std::clamp(gemm.chains.count, 1, kMaxFewWarps);
    const SimtFewRowsParams params{gemm, few_stages(kRows, warps)};
    const int columns = gemm.gated ? kFewSums / 2 : kFewSums;
    const auto ctas = static_cast<unsigned>((gemm.columns + columns - 1) / columns);
    simt_few_rows_kernel<kRows>
        <<<ctas, static_cast<unsigned>(warps * 32),
           static_cast<std::size_t>(few_shared_bytes(kRows, warps, params.stages)), cuda_stream(stream)>>>(params);
    check_cuda(cudaGetLastError(), "simt_few_rows");
  });
}

}  // namespace

}  // namespace ringattn::cuda
