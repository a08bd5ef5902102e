// SPDX-License-Identifier: Apache-2.0
// sm80_gemm_ordered: batched GEMM in the summation order of cpu_gemm. Each sum is one chain of fp32 multiply-adds over
// K, ascending, from zero. A thread has 8 rows × 4 or 8 columns of out in registers. Both operands are staged through
// shared memory in fp32, 16 or 32 values of K at a time.
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/cuda/widen.cuh"
#include "kernels/gemm/sm80/sm80_gemm.hpp"

namespace ringattn::sm80 {

namespace {

using cuda::GemmParams;

constexpr int kLoadElements = 8;  // elements per load; dims are multiples of it
constexpr int kRowsOfThread = 8;
constexpr int kQuadColumns = 4;

template <class Element_, bool kTransposed_, int kColumns_>
struct OrderedGemm {
  using Element = Element_;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kDepth = kColumns == kSmallOrderedTileN ? 32 : 16;  // K per step
  static constexpr int kLoadsPerDepth = kDepth / kLoadElements;
  static constexpr int kQuads = kColumns == kSmallOrderedTileN ? 1 : 2;  // quads of columns per thread
  static constexpr int kQuadStep = kColumns / kQuads;                    // columns from one quad to the next
  static constexpr int kThreads = kOrderedTileM / kRowsOfThread * kQuadStep / kQuadColumns;
  static constexpr int kRowLoads = kOrderedTileM * kLoadsPerDepth / kThreads;
  static constexpr int kWeightLoads = kColumns * kLoadsPerDepth / kThreads;

  // Swizzled index of row or column `at` in line k of shared memory. Neither lanes that write eight K of eight or
  // sixteen lines each nor lanes that read a line have bank conflicts. Eight neighbours stay contiguous.
  static __device__ __forceinline__ int swizzled(int at, int k) {
    return at ^ (k / kLoadElements % kLoadsPerDepth * (32 / kLoadsPerDepth));
  }
  static_assert(kQuadStep % 32 == 0 && kThreads % 32 == 0 && kWeightLoads >= 1);
};

using cuda::widen;
template <class Element>
__device__ __forceinline__ void widen(const uint4& chunk, float (&to)[kLoadElements]) {
  const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    to[2 * w] = widen<Element>(words[w]);
    to[2 * w + 1] = widen<Element>(words[w] >> 16);
  }
}

// Eight elements of row `row` from `column` on, or zeros outside of the matrix.
__device__ __forceinline__ uint4 load_chunk(const char* data, std::int64_t stride, bool aligned, int row, int rows,
                                            int column, int columns) {
  if (row >= rows || column >= columns) return uint4{0, 0, 0, 0};
  const char* const from = data + static_cast<std::int64_t>(row) * stride + 2 * column;
  if (aligned) return *reinterpret_cast<const uint4*>(from);
  const auto* const elements = reinterpret_cast<const std::uint16_t*>(from);
  const auto two = [&](int w) { return elements[2 * w] | static_cast<std::uint32_t>(elements[2 * w + 1]) << 16; };
  return uint4{two(0), two(1), two(2), two(3)};
}

// A thread's elements of both operands for the next step, in registers.
template <class C>
struct OperandPrefetch {
  uint4 rows[C::kRowLoads];
  uint4 weights[C::kWeightLoads];

  __device__ __forceinline__ void load(const GemmParams& p, const char* of_rows, const char* of_weights, int row,
                                       int column, int depth) {
    const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < C::kRowLoads; ++i) {
      const int at = thread + i * C::kThreads;
      rows[i] = load_chunk(of_rows, p.rows.stride, p.rows.aligned, row + at / C::kLoadsPerDepth, p.row_count,
                           depth + at % C::kLoadsPerDepth * kLoadElements, p.dim_k);
    }
#pragma unroll
    for (int i = 0; i < C::kWeightLoads; ++i) {
      const int at = thread + i * C::kThreads;
      if constexpr (C::kTransposed) {
        constexpr int kLoadsPerLine = C::kColumns / kLoadElements;
        weights[i] = load_chunk(of_weights, p.weights.stride, p.weights.aligned, depth + at / kLoadsPerLine, p.dim_k,
                                column + at % kLoadsPerLine * kLoadElements, p.dim_n);
      } else {
        weights[i] = load_chunk(of_weights, p.weights.stride, p.weights.aligned, column + at / C::kLoadsPerDepth,
                                p.dim_n, depth + at % C::kLoadsPerDepth * kLoadElements, p.dim_k);
      }
    }
  }

  __device__ __forceinline__ void store(float (*to_rows)[kOrderedTileM], float (*to_weights)[C::kColumns]) const {
    const auto thread = static_cast<int>(threadIdx.x);
    float wide[kLoadElements];
#pragma unroll
    for (int i = 0; i < C::kRowLoads; ++i) {
      const int at = thread + i * C::kThreads;
      widen<typename C::Element>(rows[i], wide);
#pragma unroll
      for (int j = 0; j < kLoadElements; ++j) {
        const int k = at % C::kLoadsPerDepth * kLoadElements + j;
        to_rows[k][C::swizzled(at / C::kLoadsPerDepth, k)] = wide[j];
      }
    }
#pragma unroll
    for (int i = 0; i < C::kWeightLoads; ++i) {
      const int at = thread + i * C::kThreads;
      widen<typename C::Element>(weights[i], wide);
      if constexpr (C::kTransposed) {
        constexpr int kLoadsPerLine = C::kColumns / kLoadElements;
        const int k = at / kLoadsPerLine;
        auto* const to = reinterpret_cast<float4*>(&to_weights[k][C::swizzled(at % kLoadsPerLine * kLoadElements, k)]);
        to[0] = {wide[0], wide[1], wide[2], wide[3]};
        to[1] = {wide[4], wide[5], wide[6], wide[7]};
      } else {
#pragma unroll
        for (int j = 0; j < kLoadElements; ++j) {
          const int k = at % C::kLoadsPerDepth * kLoadElements + j;
          to_weights[k][C::swizzled(at / C::kLoadsPerDepth, k)] = wide[j];
        }
      }
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 512 / C::kThreads)
    gemm_ordered_kernel(const __grid_constant__ GemmParams p) {
  __shared__ __align__(16) float rows[C::kDepth][kOrderedTileM];
  __shared__ __align__(16) float weights[C::kDepth][C::kColumns];
  const auto heads = static_cast<unsigned>(p.heads);
  const auto head = static_cast<int>(blockIdx.x % heads);
  const int row = static_cast<int>(blockIdx.x / heads) * kOrderedTileM;
  const int column = static_cast<int>(blockIdx.y) * C::kColumns;
  const char* const of_rows = p.rows.data + head * p.rows.head_stride;
  const char* const of_weights = p.weights.data + head * p.weights.head_stride;

  // In a warp, eight lanes cover neighbouring columns and four cover rows.
  constexpr int kWarpColumns = C::kQuadStep / 32;
  const auto lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int own_row = (warp / kWarpColumns * 4 + lane / 8) * kRowsOfThread;
  const int own_column = (warp % kWarpColumns * 8 + lane % 8) * kQuadColumns;

  float sums[kRowsOfThread][C::kQuads][kQuadColumns] = {};
  OperandPrefetch<C> ahead;
  ahead.load(p, of_rows, of_weights, row, column, 0);
  for (int depth = 0; depth < p.dim_k; depth += C::kDepth) {
    __syncthreads();
    ahead.store(rows, weights);
    __syncthreads();
    ahead.load(p, of_rows, of_weights, row, column, depth + C::kDepth);
    const int count = p.dim_k - depth < C::kDepth ? p.dim_k - depth : C::kDepth;
#pragma unroll 1
    for (int first = 0; first < count; first += kLoadElements) {  // steps without K are skipped
#pragma unroll 2
      for (int k = first; k < first + kLoadElements; ++k) {
        float a[kRowsOfThread], b[C::kQuads][kQuadColumns];
#pragma unroll
        for (int i = 0; i < kRowsOfThread; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(&rows[k][C::swizzled(own_row, k) + i]);
          a[i] = four.x, a[i + 1] = four.y, a[i + 2] = four.z, a[i + 3] = four.w;
        }
#pragma unroll
        for (int q = 0; q < C::kQuads; ++q) {
          const float4 four =
              *reinterpret_cast<const float4*>(&weights[k][C::swizzled(own_column + q * C::kQuadStep, k)]);
          b[q][0] = four.x, b[q][1] = four.y, b[q][2] = four.z, b[q][3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
#pragma unroll
          for (int q = 0; q < C::kQuads; ++q) {
#pragma unroll
            for (int c = 0; c < kQuadColumns; ++c) sums[i][q][c] = fmaf(a[i], b[q][c], sums[i][q][c]);
          }
        }
      }
    }
  }

  using Mma = cuda::MmaTraits<typename C::Element>;
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const int at = row + own_row + i;
    if (at >= p.row_count) break;
    char* const to = p.out.data + static_cast<std::int64_t>(at) * p.out.stride + head * p.out.head_stride;
#pragma unroll
    for (int q = 0; q < C::kQuads; ++q) {
      const int first = column + own_column + q * C::kQuadStep;
      if (first >= p.dim_n) continue;
      const float(&four)[kQuadColumns] = sums[i][q];
      const uint2 words{Mma::pack(four[0], four[1]), Mma::pack(four[2], four[3])};
      auto* const elements = reinterpret_cast<std::uint16_t*>(to) + first;
      if (p.out.aligned) {
        *reinterpret_cast<uint2*>(elements) = words;
      } else {
        elements[0] = static_cast<std::uint16_t>(words.x);
        elements[1] = static_cast<std::uint16_t>(words.x >> 16);
        elements[2] = static_cast<std::uint16_t>(words.y);
        elements[3] = static_cast<std::uint16_t>(words.y >> 16);
      }
    }
  }
}

template <class C>
void launch_gemm_ordered_kernel(const GemmParams& p, Stream stream) {
  const auto row_tiles = (static_cast<unsigned>(p.row_count) + kOrderedTileM - 1) / kOrderedTileM;
  const auto columns = (static_cast<unsigned>(p.dim_n) + C::kColumns - 1) / C::kColumns;
  const dim3 grid(row_tiles * static_cast<unsigned>(p.heads), columns);
  gemm_ordered_kernel<C><<<grid, C::kThreads, 0, cuda_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), "sm80_gemm_ordered");
}

template <class Element, bool kTransposed>
void launch_as(const GemmParams& p, Stream stream) {
  if (p.dim_n <= kSmallN) {
    launch_gemm_ordered_kernel<OrderedGemm<Element, kTransposed, kSmallOrderedTileN>>(p, stream);
  } else {
    launch_gemm_ordered_kernel<OrderedGemm<Element, kTransposed, kLargeOrderedTileN>>(p, stream);
  }
}

template <class Element>
void launch_gemm_ordered(const GemmParams& p, Stream stream) {
  p.transposed ? launch_as<Element, true>(p, stream) : launch_as<Element, false>(p, stream);
}

template <class Element>
void prepare_gemm_ordered() {
  cuda::load_kernel(gemm_ordered_kernel<OrderedGemm<Element, false, kSmallOrderedTileN>>);
  cuda::load_kernel(gemm_ordered_kernel<OrderedGemm<Element, false, kLargeOrderedTileN>>);
  cuda::load_kernel(gemm_ordered_kernel<OrderedGemm<Element, true, kSmallOrderedTileN>>);
  cuda::load_kernel(gemm_ordered_kernel<OrderedGemm<Element, true, kLargeOrderedTileN>>);
}

}  // namespace

constinit const cuda::GemmLauncher gemm_ordered_bf16{prepare_gemm_ordered<__nv_bfloat16>,
                                                     launch_gemm_ordered<__nv_bfloat16>};
constinit const cuda::GemmLauncher gemm_ordered_fp16{prepare_gemm_ordered<__half>, launch_gemm_ordered<__half>};

}  // namespace ringattn::sm80
