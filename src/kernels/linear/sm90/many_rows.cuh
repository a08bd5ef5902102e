// SPDX-License-Identifier: Apache-2.0
// Linear layers with wgmma, for more than a few rows. CTAs are persistent, warp-specialized and work in pairs, which
// share the weights or the rows of their two tiles: each loads one half, and TMA multicasts it. A producer warp loads
// ahead, even into the next tile. Each of two consumer warpgroups has 64 rows, and keeps the sum of the current chain
// and those of earlier chains in registers. Sums that don't fit are in shared memory, in the place that y is staged in
// later: with leaves, the sum of the first four; for tiles with 256 columns, half of the closed sums.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/matrix.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma.cuh"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/fold.cuh"
#include "kernels/linear/sm90/linear_kernels.hpp"
#include "kernels/linear/sm90/matrix_tma.cuh"

namespace ringattn::sm90 {

inline constexpr int kManyRowsThreads = 3 * kWarpgroup;

template <class Element_, ManyRowsConfig kConfig>
struct ManyRows {
  using Element = Element_;
  static constexpr bool kGated = kConfig.gated, kLeaves = kConfig.leaves;
  static constexpr int kRows = ManyRowsConfig::kRows;
  static constexpr int kSums = kConfig.sums;
  static constexpr int kBlocks = kSums / 8;  // of 8 columns of sums
  static constexpr int kColumns = kConfig.columns();
  static constexpr int kStages = kConfig.stages;
  static constexpr int kPanels = kConfig.panels;
  static constexpr bool kHalves = kConfig.halves();
  static_assert(kPanels * cuda::kPanelColumns == kColumns);  // panels of a tile are written without waits in between
  static constexpr int kRowBytes = kRows * cuda::kPanelRowBytes;  // per stage; its weights follow
  static constexpr int kHalfRowBytes = kRowBytes / 2;
  static constexpr int kHalfWeightBytes = kSums / 2 * cuda::kPanelRowBytes;
  static constexpr int kStageBytes = kConfig.stage_bytes();
  static constexpr int kStashOrOutBytes = kConfig.stash_or_out_bytes();
  static constexpr int kSharedBytes = kConfig.shared_bytes();
};

template <class C>
struct ManyRowsMemory {
  std::uint32_t base;  // aligned to 1,024 bytes, as the 128-byte swizzle requires

  __device__ __forceinline__ std::uint32_t stage(std::uint32_t number) const { return base + number * C::kStageBytes; }
  // A warpgroup has its stash, or its panels of y, there.
  __device__ __forceinline__ std::uint32_t stash(int warpgroup) const {
    return base + C::kStages * C::kStageBytes + static_cast<std::uint32_t>(warpgroup * (C::kStashOrOutBytes / 2));
  }
  __device__ __forceinline__ std::uint32_t full(std::uint32_t number) const {
    return stash(2) + number * kBarrierBytes;
  }
  __device__ __forceinline__ std::uint32_t empty(std::uint32_t number) const { return full(C::kStages + number); }
};

struct LinearTile {
  int row, column;  // of y
};

// Calls visit(tile) for the tiles of this CTA, in the same order in all warps of a pair.
template <class C, class Visit>
__device__ __forceinline__ void for_each_linear_tile(const ManyRowsParams& p, Visit visit) {
  const int rank = static_cast<int>(rank_in_cluster());
  const int pair_rows = p.shares_weights ? 2 * C::kRows : C::kRows;
  const int pair_columns = p.shares_weights ? C::kColumns : 2 * C::kColumns;
  const int row_pairs = (p.gemm.rows + pair_rows - 1) / pair_rows;
  const int column_pairs = (p.gemm.columns + pair_columns - 1) / pair_columns;
  const int swizzled_pairs = p.swizzle * column_pairs;
  const int pairs = row_pairs * column_pairs;
  for (int number = static_cast<int>(blockIdx.x) / 2; number < pairs; number += static_cast<int>(gridDim.x) / 2) {
    const int first = number / swizzled_pairs * p.swizzle;
    const int rows = min(p.swizzle, row_pairs - first);
    const int in_group = number % swizzled_pairs;
    visit(LinearTile{(first + in_group % rows) * pair_rows + (p.shares_weights ? rank * C::kRows : 0),
                     in_group / rows * pair_columns + (p.shares_weights ? 0 : rank * C::kColumns)});
  }
}

// One thread. Elements outside of the tensors are zero-filled, and count for the barrier's byte count.
template <class C>
__device__ __forceinline__ void load_linear_panels(const ManyRowsParams& p, const ManyRowsMemory<C>& memory) {
  const std::uint32_t rank = rank_in_cluster();
  PackedPipelineState<C::kStages> ring;
  for_each_linear_tile<C>(p, [&](const LinearTile& tile) {
    for (int chain = 0; chain < p.gemm.chains.count; ++chain) {
      const int end = p.gemm.chains.end(chain);
      for (int k = p.gemm.chains.begin(chain); k < end; k += cuda::kPanelColumns, ring.advance()) {
        const std::uint32_t stage = ring.stage();
        const std::uint32_t full = memory.full(stage);
        barrier_wait(memory.empty(stage), ring.parity() ^ 1U);
        barrier_arrive_expect(full, C::kStageBytes);
        const std::uint32_t rows = memory.stage(stage);
        const std::uint32_t weights = rows + C::kRowBytes;
        // Gated: the halves of a tile's weights are the gate's and the up matrix's.
        const auto weight_row = [&](std::uint32_t half) {
          return tile.column + (C::kGated ? 0 : static_cast<int>(half) * (C::kSums / 2));
        };
        if (p.shares_weights) {
          tma_load_rows(rows, &p.x, full, k, tile.row);
          tma_load_rows_to_pair(weights + rank * C::kHalfWeightBytes, &p.weights[C::kGated ? rank : 0], full, k,
                                weight_row(rank));
          continue;
        }
        tma_load_rows_to_pair(rows + rank * C::kHalfRowBytes, &p.x, full, k,
                              tile.row + static_cast<int>(rank) * (C::kRows / 2));
        tma_load_rows(weights, &p.weights[0], full, k, weight_row(0));
        tma_load_rows(weights + C::kHalfWeightBytes, &p.weights[C::kGated ? 1 : 0], full, k, weight_row(1));
      }
    }
  });
}

__device__ __forceinline__ float4 four_of(const float (&sums)[4]) {
  return make_float4(sums[0], sums[1], sums[2], sums[3]);
}

// The stash of a thread: float4s that are this many bytes apart.
inline constexpr std::uint32_t kStashStep = kWarpgroup * 16;

// As floats: the compiler would copy accumulators to integers between the wgmma that write them, and serialize these.
__device__ __forceinline__ void store_stash(std::uint32_t at, const float (&sums)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]),
               "f"(sums[3])
               : "memory");
}
__device__ __forceinline__ float4 load_stash(std::uint32_t at) {
  float4 four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(at)
               : "memory");
  return four;
}
__device__ __forceinline__ void add_stash(float (&sums)[4], std::uint32_t at) {
  const float4 first = load_stash(at);
  sums[0] = __fadd_rn(first.x, sums[0]);
  sums[1] = __fadd_rn(first.y, sums[1]);
  sums[2] = __fadd_rn(first.z, sums[2]);
  sums[3] = __fadd_rn(first.w, sums[3]);
}
// Called before a tile's first store to the stash: waits until the stores of the previous tile have read the y panels
// in the same memory.
__device__ __forceinline__ void begin_stash(int warpgroup) {
  if (thread_of_warpgroup() == 0) tma_store_wait_read();
  named_sync(warpgroup + 1, kWarpgroup);
}

// Sums of the chains of a tile that are complete, in a warpgroup.
template <class C>
struct ManyRowsFold {
  cuda::LinearFold<C::kBlocks, false> fold;

  __device__ __forceinline__ void start() { fold.start(); }
  __device__ __forceinline__ void add(int chain, int, bool is_empty, const float (&sums)[C::kBlocks][4], std::uint32_t,
                                      int) {
    fold.add(chain, is_empty, sums);
  }
  __device__ __forceinline__ void finish(int) {}
  __device__ __forceinline__ float4 total(int, const float (&)[C::kBlocks][4], std::uint32_t, int block) const {
    return four_of(fold.splits[block]);
  }
};

// Like LinearFold<…, false>, with the second half of the columns in shared memory. The last chain's sums stay in their
// registers, and the others are added to them.
template <class C>
struct ManyRowsHalves {
  static constexpr int kKept = C::kBlocks / 2;
  float kept[kKept][4];

  __device__ __forceinline__ void start() { cuda::start_sums(kept); }
  __device__ __forceinline__ void add(int chain, int chains, bool, const float (&sums)[C::kBlocks][4],
                                      std::uint32_t stash, int warpgroup) {
    if (chain + 1 == chains) return;
    cuda::add_sums(kept, reinterpret_cast<const float(&)[kKept][4]>(sums));
    if (chain == 0) {
      begin_stash(warpgroup);
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        store_stash(stash + static_cast<std::uint32_t>(i) * kStashStep, sums[kKept + i]);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const std::uint32_t at = stash + static_cast<std::uint32_t>(i) * kStashStep;
      float closed[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) closed[e] = sums[kKept + i][e];
      add_stash(closed, at);
      store_stash(at, closed);
    }
  }
  __device__ __forceinline__ void finish(int) {}
  __device__ __forceinline__ float4 total(int chains, const float (&sums)[C::kBlocks][4], std::uint32_t stash,
                                          int block) const {
    float4 closed;
    if (block < kKept) {
      closed = four_of(kept[block % kKept]);
    } else {
      // A tile with one split has stored nothing. A branch here would serialize the wgmma.
      closed = load_stash(stash + static_cast<std::uint32_t>(block - kKept) * kStashStep);
      closed = make_float4(chains > 1 ? closed.x : -0.0F, chains > 1 ? closed.y : -0.0F, chains > 1 ? closed.z : -0.0F,
                           chains > 1 ? closed.w : -0.0F);
    }
    const float(&last)[4] = sums[block];
    return make_float4(__fadd_rn(closed.x, last[0]), __fadd_rn(closed.y, last[1]), __fadd_rn(closed.z, last[2]),
                       __fadd_rn(closed.w, last[3]));
  }
};

// As LinearFold<…, true>, with the sum of the first four of eight leaves in shared memory.
template <class C>
struct ManyRowsTree {
  float pair[C::kBlocks][4];
  float four[C::kBlocks][4];

  __device__ __forceinline__ void start() {
    cuda::start_sums(pair);
    cuda::start_sums(four);
  }
  __device__ __forceinline__ void add(int leaf, int leaves, bool is_empty, const float (&sums)[C::kBlocks][4],
                                      std::uint32_t stash, int warpgroup) {
    if (!is_empty) cuda::add_sums(pair, sums);
    if (leaf % 2 == 0) return;
    cuda::add_sums(four, pair);
    cuda::start_sums(pair);
    if (leaves < kLinearLeaves || leaf % 4 != 3) return;
    if (leaf == 3) begin_stash(warpgroup);
#pragma unroll
    for (int i = 0; i < C::kBlocks; ++i) {
      const std::uint32_t at = stash + static_cast<std::uint32_t>(i) * kStashStep;
      if (leaf == 3) {
        store_stash(at, four[i]);
      } else {
        add_stash(four[i], at);
      }
    }
    if (leaf == 3) cuda::start_sums(four);
  }
  __device__ __forceinline__ void finish(int leaves) {
    if (leaves == 1) cuda::add_sums(four, pair);
  }
  __device__ __forceinline__ float4 total(int, const float (&)[C::kBlocks][4], std::uint32_t, int block) const {
    return four_of(four[block]);
  }
};

template <class C>
using ManyRowsFoldOf =
    std::conditional_t<C::kLeaves, ManyRowsTree<C>, std::conditional_t<C::kHalves, ManyRowsHalves<C>, ManyRowsFold<C>>>;

// y of a warpgroup's 64 rows, through its panels of shared memory. total(block) returns the sums of 8 columns.
template <class C, class Total, class Activation>
__device__ __forceinline__ void store_linear_rows(const ManyRowsParams& p, const LinearTile& tile, int warpgroup,
                                                  std::uint32_t panels, Total total, Activation activation) {
  using Element = typename C::Element;
  const int thread = thread_of_warpgroup();
  const int lane = thread % 32;
  const int first_row = tile.row + warpgroup * 64;
  // The stores of the last tile have read the panels, and all threads have read the stash in the same memory.
  if (thread == 0) tma_store_wait_read();
  named_sync(warpgroup + 1, kWarpgroup);
#pragma unroll
  for (int turn = 0; turn < C::kPanels; ++turn) {
    // Parts whose sums are in the stash come first. The next panel overwrites sums that have already been read.
    const int part = C::kHalves && !C::kGated ? (turn + C::kPanels / 2) % C::kPanels : turn;
    const int part_column = tile.column + part * cuda::kPanelColumns;
    const std::uint32_t panel = panels + static_cast<std::uint32_t>(turn * 64 * cuda::kPanelRowBytes);
    float4 gate[8], up[8];
#pragma unroll
    for (int block = 0; block < 8; ++block) {
      gate[block] = total(part * 8 + block);
      if constexpr (C::kGated) up[block] = total(C::kBlocks / 2 + part * 8 + block);
    }
    if (C::kHalves && (C::kGated || part >= C::kPanels / 2)) named_sync(warpgroup + 1, kWarpgroup);
#pragma unroll
    for (int pair = 0; pair < cuda::kPanelColumns / 16; ++pair) {
      std::uint32_t words[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int block = pair * 2 + half;
        const int column = part_column + block * 8 + lane % 4 * 2;
        float y[4] = {gate[block].x, gate[block].y, gate[block].z, gate[block].w};
        const float up_sums[4] = {up[block].x, up[block].y, up[block].z, up[block].w};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool present = column + e < p.gemm.columns;
          const float bias = present ? cuda::load_bias<Element>(p.gemm.bias[0], column + e) : -0.0F;
          const float up_bias = C::kGated && present ? cuda::load_bias<Element>(p.gemm.bias[1], column + e) : -0.0F;
#pragma unroll
          for (int i = e; i < 4; i += 2) {
            y[i] = activation(__fadd_rn(y[i], bias));
            if constexpr (C::kGated) y[i] = __fmul_rn(y[i], __fadd_rn(up_sums[i], up_bias));
          }
        }
        words[2 * half] = cuda::MmaTraits<Element>::pack(y[0], y[1]);
        words[2 * half + 1] = cuda::MmaTraits<Element>::pack(y[2], y[3]);
      }
      // Matrices: rows 0 … 7 and 8 … 15 of the first eight columns, then of the others.
      const int row = thread / 32 * 16 + lane % 16;
      store_matrix(panel + cuda::swizzled(row, pair * 2 + lane / 16), words);
    }
    if (p.stores_by_tma) {
      proxy_fence();
      named_sync(warpgroup + 1, kWarpgroup);
      if (thread == 0) {
        tma_store_rows(&p.y, panel, part_column, first_row);
        tma_store_commit();
      }
      continue;
    }
    named_sync(warpgroup + 1, kWarpgroup);
#pragma unroll 1
    for (int i = thread; i < 64 * 8; i += kWarpgroup) {
      const int row = i / 8;
      const int column = part_column + i % 8 * 8;
      if (first_row + row >= p.gemm.rows) break;
      auto* const to = reinterpret_cast<std::uint16_t*>(p.gemm.out + (first_row + row) * p.gemm.out_stride) + column;
      const uint4 elements = cuda::load_shared_16(panel + cuda::swizzled(row, i % 8));
      const std::uint32_t words[4] = {elements.x, elements.y, elements.z, elements.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (column + e < p.gemm.columns) to[e] = static_cast<std::uint16_t>(words[e / 2] >> (e % 2 * 16));
      }
    }
  }
}

// fp32 sums of a warpgroup's 64 rows.
template <class C, class Total>
__device__ __forceinline__ void store_linear_sums(const ManyRowsParams& p, const LinearTile& tile, int warpgroup,
                                                  Total total) {
  const int first_row = tile.row + warpgroup * 64 + tile_row_of_thread();
  // Four lanes store a whole sector at once, unless rows have an odd number of columns.
  const bool in_pairs = p.gemm.columns % 2 == 0 && p.gemm.out_stride % 8 == 0;
#pragma unroll
  for (int block = 0; block < C::kBlocks; ++block) {
    const float4 four = total(block);
    const float sums[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8;
      if (row >= p.gemm.rows) continue;
      const int column = tile.column + block * 8 + thread_of_cta() % 4 * 2;
      auto* const to = reinterpret_cast<float*>(p.gemm.out + row * p.gemm.out_stride) + column;
      if (in_pairs && column < p.gemm.columns) {
        *reinterpret_cast<float2*>(to) = make_float2(sums[2 * half], sums[2 * half + 1]);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (column + e < p.gemm.columns) to[e] = sums[2 * half + e];
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void multiply_linear_tiles(const ManyRowsParams& p, const ManyRowsMemory<C>& memory) {
  using Element = typename C::Element;
  const int warpgroup = thread_of_cta() / kWarpgroup - 1;
  const int lane = thread_of_cta() % 32;
  PackedPipelineState<C::kStages> ring;
  // Lanes 0 and 1 release a stage in both CTAs, because both load into both.
  const std::uint32_t empty_at = map_to_cta(memory.empty(0), static_cast<std::uint32_t>(lane & 1));
  const auto release = [&](std::uint32_t stage) {
    __syncwarp();
    if (lane < 2) barrier_arrive_at(empty_at + stage * kBarrierBytes);
  };
  const std::uint32_t stash = memory.stash(warpgroup) + static_cast<std::uint32_t>(thread_of_warpgroup() * 16);
  ManyRowsFoldOf<C> fold;
  for_each_linear_tile<C>(p, [&](const LinearTile& tile) {
    float sums[C::kBlocks][4];
    fold.start();
#pragma unroll 1
    for (int chain = 0; chain < p.gemm.chains.count; ++chain) {
      const int begin = p.gemm.chains.begin(chain);
      const int end = p.gemm.chains.end(chain);
      const int whole_end = begin + (end - begin) / cuda::kPanelColumns * cuda::kPanelColumns;
      const auto operands = [&](std::uint32_t stage) {
        const std::uint32_t rows = memory.stage(stage) + static_cast<std::uint32_t>(warpgroup * C::kHalfRowBytes);
        return uint2{warp_uniform(descriptor_low(rows)),
                     warp_uniform(descriptor_low(memory.stage(stage) + C::kRowBytes))};
      };
      // The next 16 of K are 32 bytes further in each row.
      const auto multiply = [&](const uint2& at, std::uint32_t step, bool accumulate) {
        Wgmma<Element, C::kSums>::ss(sums, descriptor(at.x + step * 2), descriptor(at.y + step * 2), accumulate);
      };
      std::uint32_t previous = 0;
#pragma unroll 1
      for (int k = begin; k < whole_end; k += cuda::kPanelColumns, ring.advance()) {
        const std::uint32_t stage = ring.stage();
        barrier_wait(memory.full(stage), ring.parity());
        const uint2 at = operands(stage);
        pin(sums);
        wgmma_fence();
#pragma unroll
        for (std::uint32_t step = 0; step < 4; ++step) multiply(at, step, k > begin || step > 0);
        wgmma_commit();
        if (k > begin) {
          wgmma_wait<1>();
          release(previous);
        }
        previous = stage;
      }
      wgmma_wait<0>();
      pin(sums);
      if (begin < whole_end) release(previous);
      // A chain ends after a multiple of 16, or with zeros. The rest of the panel belongs to the next leaf.
      if (whole_end < end) {
        const std::uint32_t stage = ring.stage();
        barrier_wait(memory.full(stage), ring.parity());
        const uint2 at = operands(stage);
#pragma unroll 1
        for (int step = 0; step * 16 < end - whole_end; ++step) {
          pin(sums);
          wgmma_fence();
          multiply(at, static_cast<std::uint32_t>(step), begin < whole_end || step > 0);
          wgmma_commit();
          wgmma_wait<0>();
          pin(sums);
        }
        release(stage);
        ring.advance();
      }
      fold.add(chain, p.gemm.chains.count, begin == end, sums, stash, warpgroup);
    }
    fold.finish(p.gemm.chains.count);
    const auto total = [&](int block) { return fold.total(p.gemm.chains.count, sums, stash, block); };
    if (C::kLeaves && !C::kGated && p.gemm.writes_sums) {
      store_linear_sums<C>(p, tile, warpgroup, total);
    } else {
      cuda::with_activation<C::kGated>(p.gemm.activation, [&](auto activation) {
        store_linear_rows<C>(p, tile, warpgroup, memory.stash(warpgroup), total, activation);
      });
    }
  });
  if (thread_of_warpgroup() == 0) tma_store_wait();
}

template <class C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kManyRowsThreads, 1)
    many_rows_kernel(const __grid_constant__ ManyRowsParams p) {
  extern __shared__ unsigned char shared[];
  const ManyRowsMemory<C> memory{cuda::aligned_shared_address<1024>(shared)};
  if (threadIdx.x == 0) {
    for (std::uint32_t stage = 0; stage < C::kStages; ++stage) {
      barrier_init(memory.full(stage), 1);
      barrier_init(memory.empty(stage), 2 * 2 * kWarpgroup / 32);
    }
    barrier_init_fence();
  }
  cluster_sync();
  cuda::pdl_launch_dependents();
  cuda::pdl_wait();
  if (threadIdx.x < kWarpgroup) {
    reg_dealloc<C::kHalves ? 24 : 40>();
    if (threadIdx.x == 0) load_linear_panels<C>(p, memory);
  } else {
    reg_alloc<C::kHalves ? 240 : 232>();
    multiply_linear_tiles<C>(p, memory);
  }
  cluster_sync();  // the other CTA writes to a CTA's memory and arrives at its barriers
}

}  // namespace ringattn::sm90
