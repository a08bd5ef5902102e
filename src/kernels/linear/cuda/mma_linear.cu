// SPDX-License-Identifier: Apache-2.0
// Linear layers by mma.sync m16n8k16. It has the bits of wgmma: both add 16 products at a time, in K order. One CTA
// computes one output tile. K panels of 64 are loaded to pipeline stages by cp.async, or element by element if rows are
// not aligned to 16 bytes.
#include <cstdint>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/fold.cuh"
#include "kernels/linear/cuda/linear_gemm.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kMmaTileN = 128;  // rows of weights per tile; gated: half of them of each matrix
constexpr int kMmaThreads = 256;

// A warp computes 32 rows × kWarpColumns of the tile's columns. Leaves keep three more sums than splits in registers,
// so their tiles are smaller.
template <class Element_, bool kGated_, bool kLeaves_>
struct MmaLinear {
  using Element = Element_;
  static constexpr bool kGated = kGated_, kLeaves = kLeaves_;
  static constexpr int kRows = kLeaves ? 64 : 128;
  static constexpr int kWarpColumns = kLeaves ? 32 : 64;
  static constexpr int kColumns = kGated ? kMmaTileN / 2 : kMmaTileN;  // of y
  static constexpr int kBlocks = kWarpColumns / 8;                     // of 8 columns of sums, per warp
  static constexpr int kStages = 3;
  static constexpr int kStageBytes = (kRows + kMmaTileN) * kPanelRowBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= 99 * 1024);  // which every device from sm_80 on provides per CTA
  static_assert(kRows / 32 * (kMmaTileN / kWarpColumns) * 32 == kMmaThreads);
};

// Copies a panel of K [k, end) of rows [first, first + kPanelRows) of `rows`. Elements outside become zeros.
template <int kPanelRows>
__device__ __forceinline__ void copy_linear_panel(std::uint32_t target, const RowsOf& source, int first, int rows,
                                                  int k, int end) {
  const bool aligned = source.aligned();
  const int chunk = static_cast<int>(threadIdx.x) % 8;
  const int column = k + chunk * 8;
#pragma unroll 4
  for (int row = static_cast<int>(threadIdx.x) / 8; row < kPanelRows; row += kMmaThreads / 8) {
    const std::uint32_t to = target + swizzled(row, chunk);
    const int present = first + row < rows ? min(8, end - column) : 0;
    if (aligned && (present >= 8 || present <= 0)) {
      copy_16(to, present > 0 ? source.at(first + row) + std::int64_t{column} * 2 : source.data, present > 0);
      continue;
    }
    std::uint32_t words[4] = {};
    if (present > 0) {
      const auto* const from =
          reinterpret_cast<const std::uint16_t*>(source.at(first + row) + std::int64_t{column} * 2);
#pragma unroll
      for (int i = 0; i < 8; ++i) words[i / 2] |= i < present ? std::uint32_t{from[i]} << (i % 2 * 16) : 0U;
    }
    store_shared(to, uint4{words[0], words[1], words[2], words[3]});
  }
}

template <class C>
__global__ void __launch_bounds__(kMmaThreads) mma_linear_kernel(const __grid_constant__ LinearGemm p) {
  using Element = typename C::Element;
  extern __shared__ __align__(128) unsigned char mma_shared[];
  const std::uint32_t stages = shared_address(mma_shared);
  const int column_tiles = (p.columns + C::kColumns - 1) / C::kColumns;
  const int tile_row = static_cast<int>(blockIdx.x) / column_tiles * C::kRows;
  const int tile_column = static_cast<int>(blockIdx.x) % column_tiles * C::kColumns;
  const RowsOf x{p.x, p.x_stride};

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kColumnWarps = kMmaTileN / C::kWarpColumns;
  const int row = warp / kColumnWarps * 32;
  // The row of weights for a block of 8 columns of the tile. Gated: the first half of a warp's blocks comes from the
  // gate matrix, and the second half from the same columns of the up matrix.
  const int warp_column = warp % kColumnWarps * (C::kGated ? C::kWarpColumns / 2 : C::kWarpColumns);
  const auto weight_row = [&](int block) {
    constexpr int kHalf = C::kBlocks / 2;
    if constexpr (C::kGated) return block / kHalf * C::kColumns + warp_column + block % kHalf * 8;
    return warp_column + block * 8;
  };

  float sums[2][C::kBlocks][4];
  LinearFold<2 * C::kBlocks, C::kLeaves> fold;
  fold.start();
  for (int chain = 0; chain < p.chains.count; ++chain) {
    const int begin = p.chains.begin(chain);
    const int end = p.chains.end(chain);
    const int panels = (end - begin + kPanelColumns - 1) / kPanelColumns;
    const auto stage = [&](int panel) {
      return stages + static_cast<std::uint32_t>(panel % C::kStages * C::kStageBytes);
    };
    // Every panel commits a cp.async group, also past the last one, because copy_wait() counts groups.
    const auto copy = [&](int panel) {
      if (panel < panels) {
        const int k = begin + panel * kPanelColumns;
        copy_linear_panel<C::kRows>(stage(panel), x, tile_row, p.rows, k, end);
        const std::uint32_t weights = stage(panel) + C::kRows * kPanelRowBytes;
#pragma unroll
        for (int m = 0; m < (C::kGated ? 2 : 1); ++m) {
          copy_linear_panel<C::kColumns>(weights + static_cast<std::uint32_t>(m * C::kColumns * kPanelRowBytes),
                                         RowsOf{p.weights[m], p.weight_strides[m]}, tile_column, p.columns, k, end);
        }
      }
      copy_commit();
    };
    for (int panel = 0; panel < C::kStages - 1; ++panel) copy(panel);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int block = 0; block < C::kBlocks; ++block) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[b][block][e] = 0.0F;
      }
    }
    for (int panel = 0; panel < panels; ++panel) {
      copy_wait<C::kStages - 2>();
      __syncthreads();  // the panel has arrived, and all warps are done with the previous one, whose stage is filled
                        // next
      copy(panel + C::kStages - 1);
      const std::uint32_t rows = stage(panel);
      const std::uint32_t weights = rows + C::kRows * kPanelRowBytes;
      const int steps = min(4, (end - begin - panel * kPanelColumns + 15) / 16);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (step >= steps) break;
        std::uint32_t a[2][4];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          load_matrix(a[b], rows + swizzled(row + b * 16 + lane % 16, 2 * step + lane / 16));
        }
#pragma unroll
        for (int pair = 0; pair < C::kBlocks / 2; ++pair) {
          std::uint32_t w[4];  // both halves of K of columns 0 … 7, then of columns 8 … 15
          load_matrix(w, weights + swizzled(weight_row(2 * pair) + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            MmaTraits<Element>::mma(sums[b][2 * pair], a[b], w[0], w[1], sums[b][2 * pair]);
            MmaTraits<Element>::mma(sums[b][2 * pair + 1], a[b], w[2], w[3], sums[b][2 * pair + 1]);
          }
        }
      }
    }
    copy_wait<0>();
    __syncthreads();  // stages are filled anew
    fold.add(chain, begin == end, reinterpret_cast<const float(&)[2 * C::kBlocks][4]>(sums));
  }
  const auto& total = fold.total(p.chains.count);

  // Element e of a block: row e / 2 · 8 further down, column e % 2.
  const int first_column = tile_column + warp_column + lane % 4 * 2;
  const auto store = [&](int b, int block, int e, float value) {
    const int at = tile_row + row + b * 16 + lane / 4 + e / 2 * 8;
    const int column = first_column + block * 8 + e % 2;
    if (at >= p.rows || column >= p.columns) return;
    char* const to = p.out + at * p.out_stride;
    if (C::kLeaves && p.writes_sums) {
      reinterpret_cast<float*>(to)[column] = value;
    } else {
      reinterpret_cast<std::uint16_t*>(to)[column] = round_element<Element>(value);
    }
  };
  constexpr int kOutBlocks = C::kGated ? C::kBlocks / 2 : C::kBlocks;
  const auto finish = [&](auto activation) {
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) {
      float bias[2][2];
#pragma unroll
      for (int m = 0; m < (C::kGated ? 2 : 1); ++m) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = first_column + block * 8 + e;
          bias[m][e] = column < p.columns ? load_bias<Element>(p.bias[m], column) : -0.0F;
        }
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float y = activation(__fadd_rn(total[b * C::kBlocks + block][e], bias[0][e % 2]));
          if constexpr (C::kGated) {
            y = __fmul_rn(y, __fadd_rn(total[b * C::kBlocks + kOutBlocks + block][e], bias[1][e % 2]));
          }
          store(b, block, e, y);
        }
      }
    }
  };
  if (C::kLeaves && p.writes_sums) {
#pragma unroll
    for (int i = 0; i < 2 * C::kBlocks * 4; ++i) {
      store(i / (4 * C::kBlocks), i / 4 % C::kBlocks, i % 4, total[i / 4][i % 4]);
    }
  } else {
    with_activation<C::kGated>(p.activation, finish);
  }
}

template <class C>
void prepare_mma() {
  check_cuda(cudaFuncSetAttribute(mma_linear_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
             "cudaFuncSetAttribute");
}

template <class C>
void launch_mma(const LinearGemm& p, Stream stream) {
  const std::int64_t tiles =
      ((std::int64_t{p.rows} + C::kRows - 1) / C::kRows) * ((std::int64_t{p.columns} + C::kColumns - 1) / C::kColumns);
  mma_linear_kernel<C><<<static_cast<unsigned>(tiles), kMmaThreads, C::kSharedBytes, cuda_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), "mma_linear");
}

// Calls visit(MmaLinear<…>{}) for the product's kernel.
template <class Element, class Visit>
void with_mma_kernel(bool gated, bool leaves, Visit visit) {
  if (gated && leaves) return visit(MmaLinear<Element, true, true>{});
  if (gated) return visit(MmaLinear<Element, true, false>{});
  if (leaves) return visit(MmaLinear<Element, false, true>{});
  visit(MmaLinear<Element, false, false>{});
}
template <class Visit>
void with_mma_kernel(Dtype dtype, bool gated, bool leaves, Visit visit) {
  if (dtype == Dtype::kBf16) return with_mma_kernel<__nv_bfloat16>(gated, leaves, visit);
  with_mma_kernel<__half>(gated, leaves, visit);
}

}  // namespace

constinit const LinearLauncher mma_linear = {
    [](Dtype dtype) {
      for (const bool gated : {false, true}) {
        for (const bool leaves : {false, true}) {
          with_mma_kernel(dtype, gated, leaves, [](auto config) { prepare_mma<decltype(config)>(); });
        }
      }
    },
    [](const LinearGemm&, std::int64_t) { return std::size_t{0}; },
    [](const LinearGemm& gemm, Stream stream) {
      with_mma_kernel(gemm.dtype, gemm.gated, gemm.chains.leaves,
                      [&](auto config) { launch_mma<decltype(config)>(gemm, stream); });
    }};

}  // namespace ringattn::cuda
