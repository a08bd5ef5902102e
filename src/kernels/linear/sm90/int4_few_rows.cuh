// SPDX-License-Identifier: Apache-2.0
// int4 linear layers for few rows of x. W, dequantized in registers, is operand A, and up to 64 rows of x are operand
// B: by mma.sync for up to 16 rows and by wgmma for more, with the same bits. A CTA has one split or leaf, for 64 rows
// of W in each of its warpgroups, so that most of W is in flight at once. Its first warp also loads: groups of W by
// bulk copies, x by TMA. Sums of splits and leaves are stored in L2, and the last warpgroup of a tile adds them in
// their order.
#pragma once

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma.cuh"
#include "kernels/linear/cuda/int4_operand.cuh"
#include "kernels/linear/cuda/quantized_finish.cuh"
#include "kernels/linear/sm90/int4.hpp"

namespace ringattn::sm90 {

template <class Element_, int kRows_>
struct FewRowsInt4 {
  using Element = Element_;
  static constexpr int kRows = kRows_;
  // More warpgroups share x: with 32 rows and more, its loads take longer than those of W.
  static constexpr int kWarpgroups = kRows <= 16 ? 2 : 4;
  static constexpr int kCtas = 4 / kWarpgroups;  // per SM
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  static constexpr bool kByWgmma = kRows > 16;  // bench/notes/linear.md has both
  static constexpr int kPanelBytes = kRows * 128;
  static constexpr int kXBytes = 2 * kPanelBytes;
  static constexpr int kLoadedBytes = kXBytes + kWarpgroups * cuda::kInt4UsedBytes;  // of a stage: one group
  static constexpr int kStageBytes = (kXBytes + kWarpgroups * cuda::kInt4BlockBytes + 1023) / 1024 * 1024;
  // An SM has 228 KiB, of which each CTA takes 1 KiB more than it requests.
  static constexpr int kStages = (228 * 1024 / kCtas - 2048 - 64) / (kStageBytes + 2 * kBarrierBytes);
  static constexpr int kSharedBytes = cuda::aligned_shared_bytes(kStages * (kStageBytes + 2 * kBarrierBytes), 1024);
};

// The sum of all chains of a matrix for four columns of a row. load(chain) returns the sum of one.
template <class Load>
__device__ __forceinline__ float4 add_int4_chains(const cuda::LinearChains& chains, Load load) {
  const auto add = [](float4& to, const float4& more) {
    to = {__fadd_rn(to.x, more.x), __fadd_rn(to.y, more.y), __fadd_rn(to.z, more.z), __fadd_rn(to.w, more.w)};
  };
  constexpr float4 kNothing{-0.0F, -0.0F, -0.0F, -0.0F};
  float4 total = kNothing;
  if (!chains.leaves) {
#pragma unroll 4
    for (int chain = 0; chain < chains.count; ++chain) add(total, load(chain));
    return total;
  }
  float4 pair = kNothing;
  float4 four = kNothing;
#pragma unroll
  for (int leaf = 0; leaf < kLinearLeaves; ++leaf) {
    if (leaf >= chains.count) break;
    add(pair, load(leaf));
    if (leaf % 2 == 0 && leaf + 1 < chains.count) continue;
    add(four, pair);
    pair = kNothing;
    if (leaf % 4 != 3 && leaf + 1 < chains.count) continue;
    add(total, four);
    four = kNothing;
  }
  return total;
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) int4_few_rows_kernel(const __grid_constant__ HopperInt4 p) {
  extern __shared__ unsigned char int4_few_dynamic[];
  __shared__ std::uint32_t is_last[C::kWarpgroups];
  const std::uint32_t base = cuda::aligned_shared_address<1024>(int4_few_dynamic);
  const auto x_of = [&](std::uint32_t stage) { return base + stage * C::kStageBytes; };
  const auto block_of = [&](std::uint32_t stage, int warpgroup) {
    return x_of(stage) + static_cast<std::uint32_t>(C::kXBytes + warpgroup * cuda::kInt4BlockBytes);
  };
  const auto full = [&](std::uint32_t stage) { return base + C::kStages * C::kStageBytes + stage * kBarrierBytes; };
  const auto empty = [&](std::uint32_t stage) { return full(stage + C::kStages); };

  const cuda::Int4Gemm& gemm = p.gemm;
  const cuda::LinearChains& chains = gemm.chains;
  const int matrices = gemm.out.matrices;
  const int matrix_tiles = matrices * p.column_tiles;  // of 64 rows of W: the gate's, then up's
  const int ctas_of_chain = (matrix_tiles + C::kWarpgroups - 1) / C::kWarpgroups;
  const int thread = thread_of_warpgroup();
  const int chain = static_cast<int>(blockIdx.x) % chains.count;
  const int number = static_cast<int>(blockIdx.x) / chains.count;
  const int row_tile = number / ctas_of_chain;
  const int first_row = row_tile * C::kRows;
  const int first_tile = number % ctas_of_chain * C::kWarpgroups;
  const int begin = chains.begin(chain) / static_cast<int>(kInt4Group);
  const int groups = chains.end(chain) / static_cast<int>(kInt4Group) - begin;

  if (threadIdx.x == 0) {
    for (std::uint32_t stage = 0; stage < C::kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), C::kThreads / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  cuda::pdl_launch_dependents();
  // A warpgroup after the last tile multiplies the last tile's rows again, and its results are not used.
  const auto load_weights = [&](int group, std::uint32_t stage) {
    barrier_arrive_expect(full(stage), C::kLoadedBytes);
#pragma unroll
    for (int w = 0; w < C::kWarpgroups; ++w) {
      const int tile = min(first_tile + w, matrix_tiles - 1);
      tma_load_bytes(block_of(stage, w), cuda::int4_block(gemm, 0, tile, begin + group), cuda::kInt4UsedBytes,
                     full(stage));
    }
  };
  const auto load_x = [&](int group, std::uint32_t stage) {
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      tma_load_box(x_of(stage) + static_cast<std::uint32_t>(panel * C::kPanelBytes), &p.x, full(stage),
                   (begin + group) * static_cast<int>(kInt4Group) + panel * kInt4PanelColumns, 0, first_row);
    }
  };
  const bool loads = threadIdx.x < 32 && elect_one();
  if (loads) {
    // The weights were written by pack(), whose kernels do not let another one begin before they are done.
    const int early = min(groups, C::kStages);
    for (int group = 0; group < early; ++group) load_weights(group, static_cast<std::uint32_t>(group));
    cuda::pdl_wait();
    for (int group = 0; group < early; ++group) load_x(group, static_cast<std::uint32_t>(group));
  }
  __syncwarp();
  cuda::pdl_wait();

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  const int column = tile_row_of_thread();
  float acc[C::kRows / 8][4];
#pragma unroll
  for (int j = 0; j < C::kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[j][i] = groups > 0 ? 0.0F : -0.0F;
  }
  // Scale and zero of the group whose first half was dequantized last.
  float next_scale[2];
  std::uint32_t zeros[2];
  const auto load_numbers = [&](std::uint32_t block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto at = static_cast<std::uint32_t>(column + 8 * i);
      next_scale[i] = __int_as_float(cuda::load_shared_number(block + cuda::kInt4ScalesAt + 4 * at));
      zeros[i] = cuda::int4_zero_pair<typename C::Element>(cuda::load_shared_byte(block + cuda::kInt4ZerosAt + at));
    }
  };
  const auto dequantize = [&](std::uint32_t(&a)[4][4], std::uint32_t block, int half) {
    const uint4 codes = cuda::load_shared_16(block + static_cast<std::uint32_t>((half * kWarpgroup + thread) * 16));
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) cuda::int4_operand<typename C::Element>(a[i], words[i], zeros);
  };
  // Adds the scaled sums of a group, and lets its stage be filled again.
  const auto close_group = [&](int group, std::uint32_t stage, std::uint32_t parity,
                               const float(&sums)[C::kRows / 8][4], const float(&scale)[2]) {
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(empty(stage));
    if (loads && group + C::kStages < groups) {
      barrier_wait(empty(stage), parity);
      load_weights(group + C::kStages, stage);
      load_x(group + C::kStages, stage);
    }
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] = __fmaf_rn(scale[i / 2], sums[j][i], acc[j][i]);
    }
  };

  PackedPipelineState<C::kStages> ring;
  if constexpr (C::kByWgmma) {
    float sums[C::kRows / 8][4];
    const auto multiply_half = [&](const std::uint32_t(&a)[4][4], std::uint32_t panel, bool from_zero) {
      const std::uint32_t b = warp_uniform(descriptor_low(panel));
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Wgmma<typename C::Element, C::kRows>::rk(sums, a[step], descriptor(b + static_cast<std::uint32_t>(2 * step)),
                                                 step > 0 || !from_zero);
      }
      wgmma_commit();
    };
    std::uint32_t first[4][4], second[4][4];
    if (groups > 0) {
      barrier_wait(full(0), 0);
      load_numbers(block_of(0, warpgroup));
      dequantize(first, block_of(0, warpgroup), 0);
    }
    for (int group = 0; group < groups; ++group) {
      const std::uint32_t stage = ring.stage();
      const std::uint32_t parity = ring.parity();
      const float scale[2] = {next_scale[0], next_scale[1]};
      pin(sums);
      multiply_half(first, x_of(stage), true);
      dequantize(second, block_of(stage, warpgroup), 1);
      multiply_half(second, x_of(stage) + C::kPanelBytes, false);
      wgmma_wait<1>();
      ring.advance();
      if (group + 1 < groups) {
        barrier_wait(full(ring.stage()), ring.parity());
        const std::uint32_t block = block_of(ring.stage(), warpgroup);
        load_numbers(block);
        dequantize(first, block, 0);
      }
      wgmma_wait<0>();
      pin(sums);
      close_group(group, stage, parity, sums, scale);
    }
  } else {
    const int lane = thread % 32;
    for (int group = 0; group < groups; ++group, ring.advance()) {
      const std::uint32_t stage = ring.stage();
      barrier_wait(full(stage), ring.parity());
      load_numbers(block_of(stage, warpgroup));
      float sums[C::kRows / 8][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t a[4][4];
        dequantize(a, block_of(stage, warpgroup), half);
        const std::uint32_t panel = x_of(stage) + static_cast<std::uint32_t>(half * C::kPanelBytes);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {  // of steps
#pragma unroll
          for (int j = 0; j < C::kRows / 8; ++j) {
            std::uint32_t b[4];
            cuda::load_matrix(b, panel + cuda::swizzled(8 * j + lane % 8, 4 * pair + lane / 8));
            cuda::multiply<typename C::Element>(sums[j], a[2 * pair], b[0], b[1], half + pair == 0);
            cuda::multiply<typename C::Element>(sums[j], a[2 * pair + 1], b[2], b[3], false);
          }
        }
      }
      close_group(group, stage, ring.parity(), sums, next_scale);
    }
  }

  const int matrix_tile = first_tile + warpgroup;
  if (matrix_tile >= matrix_tiles) return;
  const int column_tile = matrix_tile % p.column_tiles;
  const int rows = min(C::kRows, gemm.out.rows - first_row);
  // [row tile][tile of W][chain][row][64 columns]
  const auto partial = [&](int tile, int c) {
    return gemm.partials +
           ((std::int64_t{row_tile} * matrix_tiles + tile) * chains.count + c) * (C::kRows * cuda::kInt4TileRows);
  };
  float* const mine = partial(matrix_tile, chain) + column;
#pragma unroll
  for (int j = 0; j < C::kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * j + thread % 4 * 2 + i % 2;
      if (row < rows) __stcg(mine + row * cuda::kInt4TileRows + i / 2 * 8, acc[j][i]);
    }
  }
  named_sync(1 + warpgroup, kWarpgroup);
  if (thread == 0) {
    std::uint32_t* const counter = gemm.counters + row_tile * p.column_tiles + column_tile;
    const auto parts = static_cast<std::uint32_t>(matrices * chains.count);
    const bool last = cuda::count_arrival(counter) == parts - 1;
    if (last) *counter = 0;
    is_last[warpgroup] = last ? 1 : 0;
  }
  named_sync(1 + warpgroup, kWarpgroup);
  if (is_last[warpgroup] == 0) return;
  cuda::finish_float_tile<kWarpgroup>(
      gemm.out, first_row, rows, column_tile * cuda::kInt4TileRows, cuda::kInt4TileRows, thread, [&](int row, int at) {
        const int tile = column_tile + at / cuda::kInt4TileRows * p.column_tiles;
        return add_int4_chains(chains, [&](int c) {
          const float* const from = partial(tile, c) + row * cuda::kInt4TileRows + at % cuda::kInt4TileRows;
          return __ldcg(reinterpret_cast<const float4*>(from));
        });
      });
}

}  // namespace ringattn::sm90
