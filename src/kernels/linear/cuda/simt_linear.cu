// SPDX-License-Identifier: Apache-2.0
// Linear layers in fp32, by fused multiply-adds in K order: sums have the bits of cpu_linear. Three forms, which have
// the same bits:
// - A CTA has all of K of a tile, and of others after it. The current split or leaf is in registers. Sums of those
// before
//   it are in global memory (L2), where their thread has put them.
// - With few tiles a CTA has one split or leaf of a tile. The last CTA of a tile adds their sums.
// - Up to kSimtFewRows rows: simt_few_rows.cuh.
#include <algorithm>
#include <cstdint>

#include "base/cuda.hpp"
#include "kernels/gemm/cuda/simt_tile.cuh"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/linear_gemm.hpp"
#include "kernels/linear/cuda/simt_few_rows.cuh"

namespace ringattn::cuda {

namespace {

// kCtas of them run on a multiprocessor at a time. Gated: half of a tile's columns belong to each matrix.
template <int kRows, int kColumns, int kRowWarps, int kColumnWarps, int kStages, int kCtas_>
struct SimtLinearTile : SimtTile<kRows, kColumns, kRowWarps, kColumnWarps, kStages> {
  static constexpr int kCtas = kCtas_;
};
using LargeSimtTile = SimtLinearTile<128, 128, 2, 2, 3, 2>;
using SmallSimtTile = SimtLinearTile<64, 64, 2, 2, 3, 3>;

constexpr std::int64_t kSimtCounterBytes = 4096;
constexpr std::int64_t kMaxSharedTiles = kSimtCounterBytes / 4;

struct SimtLinearParams {
  LinearGemm gemm;
  bool shares_tiles;        // a CTA has a split or leaf of a tile
  std::uint32_t* counters;  // [tiles]: splits or leaves whose sums are in memory
  float* closed;            // [CTAs, levels or 1, sums of a thread, threads]
};

// Sums that are kept while a split or leaf is summed: the total of splits, or levels of the tree of leaves.
__host__ __device__ inline int closed_levels(const LinearChains& chains) {
  if (!chains.leaves) return chains.count > 1 ? 1 : 0;
  return chains.count == 8 ? 3 : chains.count / 2;
}

template <class Tile>
struct SimtLinearOperands {
  const LinearGemm& p;
  int tile_row, tile_column;  // of y
  int tile_columns;           // of y: half of the tile's if gated
  bool aligned;

  __device__ __forceinline__ int begin(int chain) const { return p.chains.begin(chain); }
  __device__ __forceinline__ int end(int chain) const { return p.chains.end(chain); }
  __device__ __forceinline__ void copy(std::uint32_t row_panel, std::uint32_t column_panel, int, int k, int end) const {
    // `row` is not negative, and so multiplied as 32 bits.
    const auto row_of = [](const char* data, std::int64_t stride, int row) {
      return data + static_cast<std::uint64_t>(static_cast<unsigned>(row)) * static_cast<std::uint64_t>(stride);
    };
    const auto x_row = [&](int first, int own) {
      return row_of(p.x, p.x_stride, min(tile_row + first + own, p.rows - 1));
    };
    const auto weight_row = [&](int first, int own) {
      const int matrix = first >= tile_columns ? 1 : 0;
      const int column = tile_column + first - matrix * tile_columns + own;
      return row_of(p.weights[matrix], p.weight_strides[matrix], min(column, p.columns - 1));
    };
    copy_simt_rows<Tile, Tile::kRows>(row_panel, x_row, aligned, k, end);
    copy_simt_rows<Tile, Tile::kColumns>(column_panel, weight_row, aligned, k, end);
  }
};

template <class Tile, class Body>
__device__ __forceinline__ void for_each_sum(typename Tile::Sums& sums, Body body) {
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kThreadColumns; ++j) body(i * Tile::kThreadColumns + j, sums[i][j]);
  }
}

// The calling thread's sums in memory: of a CTA's level or, if tiles are shared, of a split or leaf of a tile.
template <class Tile>
__device__ __forceinline__ float* sums_in_memory(const SimtLinearParams& params, std::int64_t index) {
  return params.closed + index * (std::int64_t{Tile::kThreadSums} * Tile::kThreads) + threadIdx.x;
}

// Adds the sums of a split or leaf to those before it. Splits are added to one total; a leaf is added to the subtrees
// that it completes, as in a binary counter. Returns whether it is the last split or leaf: then `sums` is the total.
template <class Tile>
__device__ __forceinline__ bool add_closed_sums(const SimtLinearParams& params, int chain, typename Tile::Sums& sums) {
  const LinearChains& chains = params.gemm.chains;
  const std::int64_t first = std::int64_t{blockIdx.x} * closed_levels(chains);
  const int merges = chains.leaves ? __ffs(~chain) - 1 : min(chain, 1);
#pragma unroll 1
  for (int level = 0; level < merges; ++level) {
    const float* const before = sums_in_memory<Tile>(params, first + level);
    for_each_sum<Tile>(sums, [&](int at, float& sum) { sum = __fadd_rn(before[at * Tile::kThreads], sum); });
  }
  if (chain + 1 == chains.count) return true;
  float* const after = sums_in_memory<Tile>(params, first + (chains.leaves ? merges : 0));
  for_each_sum<Tile>(sums, [&](int at, float& sum) { after[at * Tile::kThreads] = sum; });
  return false;
}

// Writes the sums of a split or leaf to memory. Returns whether the CTA is the last one of the tile: then `sums` is the
// total.
template <class Tile>
__device__ __forceinline__ bool add_shared_sums(const SimtLinearParams& params, int tile, int chain,
                                                typename Tile::Sums& sums) {
  const LinearChains& chains = params.gemm.chains;
  const std::int64_t first = std::int64_t{tile} * chains.count;
  float* const own = sums_in_memory<Tile>(params, first + chain);
  for_each_sum<Tile>(sums, [&](int at, float& sum) { __stcg(own + at * Tile::kThreads, sum); });
  __threadfence();
  __syncthreads();
  const auto others = static_cast<unsigned>(chains.count) - 1;
  const bool is_last = threadIdx.x == 0 && atomicAdd(params.counters + tile, 1U) == others;
  if (__syncthreads_or(is_last ? 1 : 0) == 0) return false;
  __threadfence();
  if (threadIdx.x == 0) params.counters[tile] = 0;
  const float* const begin = sums_in_memory<Tile>(params, first);
  const auto sum_of = [&](int part, int at) {
    return __ldcg(begin + part * (Tile::kThreadSums * Tile::kThreads) + at * Tile::kThreads);
  };
  if (!chains.leaves) {
    for_each_sum<Tile>(sums, [&](int at, float& sum) { sum = sum_of(0, at); });
#pragma unroll 1
    for (int part = 1; part < chains.count; ++part) {
      for_each_sum<Tile>(sums, [&](int at, float& sum) { sum = __fadd_rn(sum, sum_of(part, at)); });
    }
    return true;
  }
  for_each_sum<Tile>(sums, [&](int at, float& sum) {
    const auto leaf = [&](int part) { return part < chains.count ? sum_of(part, at) : -0.0F; };
    const auto pair = [&](int part) { return __fadd_rn(leaf(part), leaf(part + 1)); };
    sum = __fadd_rn(__fadd_rn(pair(0), pair(2)), __fadd_rn(pair(4), pair(6)));
  });
  return true;
}

// Writes y, or sums, which have neither bias nor activation.
template <class Tile>
__device__ __forceinline__ void store_simt_tile(const LinearGemm& p, int tile_row, int tile_column,
                                                typename Tile::Sums& sums) {
  constexpr int kHalf = Tile::kThreadColumns / 2;
  with_activation<false>(p.activation, [&](auto activation) {
#pragma unroll
    for (int j = 0; j < Tile::kThreadColumns; ++j) {
      const int column = tile_column + Tile::column(j);
      if ((p.gated && j >= kHalf) || column >= p.columns) continue;
      const float bias = load_bias<float>(p.bias[0], column);
      const float up_bias = p.gated ? load_bias<float>(p.bias[1], column) : -0.0F;
#pragma unroll
      for (int i = 0; i < Tile::kThreadRows; ++i) {
        const int row = tile_row + Tile::row(i);
        if (row >= p.rows) continue;
        float y = activation(__fadd_rn(sums[i][j], bias));
        if (j < kHalf && p.gated) y = __fmul_rn(y, __fadd_rn(sums[i][j % kHalf + kHalf], up_bias));
        reinterpret_cast<float*>(p.out + row * p.out_stride)[column] = y;
      }
    }
  });
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtas)
    simt_linear_kernel(const __grid_constant__ SimtLinearParams params) {
  extern __shared__ __align__(128) float simt_shared[];
  const LinearGemm& p = params.gemm;
  const int tile_columns = p.gated ? Tile::kColumns / 2 : Tile::kColumns;
  const int column_tiles = (p.columns + tile_columns - 1) / tile_columns;
  const int tiles = (p.rows + Tile::kRows - 1) / Tile::kRows * column_tiles;
  const int parts = params.shares_tiles ? p.chains.count : 1;  // of a tile
  const auto is_aligned = [](const char* data, std::int64_t stride) { return RowsOf{data, stride}.aligned(); };
  const bool aligned = is_aligned(p.x, p.x_stride) && is_aligned(p.weights[0], p.weight_strides[0]) &&
                       (!p.gated || is_aligned(p.weights[1], p.weight_strides[1]));

  for (int item = static_cast<int>(blockIdx.x); item < tiles * parts; item += static_cast<int>(gridDim.x)) {
    const int tile = item / parts;
    const int tile_row = tile / column_tiles * Tile::kRows;
    const int tile_column = tile % column_tiles * tile_columns;
    const SimtLinearOperands<Tile> operands{p, tile_row, tile_column, tile_columns, aligned};
    const int first = params.shares_tiles ? item % parts : 0;
    const int last = params.shares_tiles ? first + 1 : p.chains.count;
    add_simt_runs<Tile>(simt_shared, operands, first, last, [&](int chain, typename Tile::Sums& sums) {
      if (p.chains.begin(chain) == p.chains.end(chain)) {  // left out: x + (−0) is x
        for_each_sum<Tile>(sums, [](int, float& sum) { sum = -0.0F; });
      }
      const bool is_whole = params.shares_tiles ? add_shared_sums<Tile>(params, tile, chain, sums)
                                                : add_closed_sums<Tile>(params, chain, sums);
      if (is_whole) store_simt_tile<Tile>(p, tile_row, tile_column, sums);
    });
  }
}

// A tile, and how its CTAs are launched.
struct SimtLinearForm {
  int rows, columns;
  int ctas;        // on a multiprocessor
  int efficiency;  // percent of the rate of fp32 multiply-adds, assumed
  void (*prepare)();
  void (*launch)(const SimtLinearParams& params, unsigned ctas, Stream stream);

  std::int64_t tile_bytes() const { return std::int64_t{rows} * columns * std::int64_t{sizeof(float)}; }
  std::int64_t tiles(const LinearGemm& gemm, std::int64_t of_rows) const {
    const int tile_columns = gemm.gated ? columns / 2 : columns;
    return (of_rows + rows - 1) / rows * ((std::int64_t{gemm.columns} + tile_columns - 1) / tile_columns);
  }
  std::int64_t slots(const LinearGemm& gemm) const { return std::int64_t{gemm.multiprocessors} * ctas; }
  bool can_share(const LinearGemm& gemm, std::int64_t of_rows) const {
    const std::int64_t count = tiles(gemm, of_rows);
    return gemm.chains.count > 1 && count <= kMaxSharedTiles && count * gemm.chains.count <= slots(gemm);
  }
};

template <class Tile>
constexpr SimtLinearForm simt_form(int efficiency) {
  return {Tile::kRows,
          Tile::kColumns,
          Tile::kCtas,
          efficiency,
          [] {
            check_cuda(cudaFuncSetAttribute(simt_linear_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            Tile::kSharedBytes),
                       "cudaFuncSetAttribute");
          },
          [](const SimtLinearParams& params, unsigned ctas, Stream stream) {
            simt_linear_kernel<Tile><<<ctas, Tile::kThreads, Tile::kSharedBytes, cuda_stream(stream)>>>(params);
          }};
}
constexpr SimtLinearForm kSimtForms[] = {simt_form<LargeSimtTile>(85), simt_form<SmallSimtTile>(65)};

struct SimtLinearPlan {
  const SimtLinearForm* form = nullptr;
  bool shares_tiles = false;
  std::int64_t ctas = 0;
};

// Chooses the tile with which the busiest multiprocessor, counting tiles or parts of tiles, has the least to do.
SimtLinearPlan plan_simt(const LinearGemm& gemm) {
  constexpr double kSharing = 1.05;  // factor by which sums that go through memory take longer
  SimtLinearPlan best;
  double least = 0.0;
  for (const SimtLinearForm& form : kSimtForms) {
    const std::int64_t tiles = form.tiles(gemm, gemm.rows);
    for (const bool shares : {false, true}) {
      if (shares && !form.can_share(gemm, gemm.rows)) continue;
      const std::int64_t parts = shares ? gemm.chains.count : 1;
      const std::int64_t most = (tiles * parts + gemm.multiprocessors - 1) / gemm.multiprocessors;
      const double time = (shares ? kSharing : 1.0) * static_cast<double>(most * form.rows * form.columns) /
                          static_cast<double>(parts * form.efficiency);
      if (best.form != nullptr && time >= least) continue;
      best = {&form, shares, std::min(tiles * parts, form.slots(gemm))};
      least = time;
    }
  }
  return best;
}

std::size_t simt_scratch_bytes(const LinearGemm& gemm, std::int64_t rows) {
  if (rows <= kSimtFewRows || gemm.chains.count <= 1) return 0;
  std::int64_t bytes = 0;
  for (const SimtLinearForm& form : kSimtForms) {
    const std::int64_t tiles = form.tiles(gemm, rows), slots = form.slots(gemm);
    const std::int64_t sums =
        std::max(std::min(tiles, slots) * closed_levels(gemm.chains), std::min(tiles * gemm.chains.count, slots));
    bytes = std::max(bytes, kSimtCounterBytes + sums * form.tile_bytes());
  }
  return static_cast<std::size_t>(bytes);
}

void launch_simt(const LinearGemm& gemm, Stream stream) {
  if (gemm.rows <= kSimtFewRows) return launch_simt_few_rows(gemm, stream);
  const SimtLinearPlan plan = plan_simt(gemm);
  const SimtLinearParams params{gemm, plan.shares_tiles, reinterpret_cast<std::uint32_t*>(gemm.scratch),
                                reinterpret_cast<float*>(gemm.scratch + kSimtCounterBytes)};
  plan.form->launch(params, static_cast<unsigned>(plan.ctas), stream);
  check_cuda(cudaGetLastError(), "simt_linear");
}

}  // namespace

constinit const LinearLauncher simt_linear = {[](Dtype) {
                                                prepare_simt_few_rows();
                                                for (const SimtLinearForm& form : kSimtForms) form.prepare();
                                              },
                                              simt_scratch_bytes, launch_simt};

}  // namespace ringattn::cuda
