// SPDX-License-Identifier: Apache-2.0
// Linear layers with wgmma, for up to 64 rows. Weights, which are read once, are operand A, and x is operand B. CTAs
// are persistent: each has a contiguous range of (tile of columns, chain of K), about as many bytes as the others. The
// sums of a tile that a CTA has whole stay in registers. Of a tile that CTAs share, the sum of each chain goes to
// memory, and the CTA that is last there adds them in their order.
#pragma once

#include <cstdint>

#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma.cuh"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/fold.cuh"
#include "kernels/linear/sm90/linear_kernels.hpp"

namespace ringattn::sm90 {

// The two narrowest forms, for few rows alone: D[64, n] ← A[64, 16] · B[16, n] + D, both operands in shared memory.
#define RINGATTN_NARROW_WGMMA(Element_, type)                                                                        \
  template <>                                                                                                        \
  struct Wgmma<Element_, 8> {                                                                                        \
    __device__ static __forceinline__ void ss(float (&d)[1][4], std::uint64_t a, std::uint64_t b, bool accumulate) { \
      asm volatile(                                                                                                  \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"                                                                \
          "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type " {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0;\n}"     \
          : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])                                               \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                                      \
    }                                                                                                                \
  };                                                                                                                 \
  template <>                                                                                                        \
  struct Wgmma<Element_, 16> {                                                                                       \
    __device__ static __forceinline__ void ss(float (&d)[2][4], std::uint64_t a, std::uint64_t b, bool accumulate) { \
      asm volatile(                                                                                                  \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"                                                               \
          "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type                                                \
          " {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0;\n}"                                                    \
          : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), \
            "+f"(d[1][3])                                                                                            \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                                      \
    }                                                                                                                \
  };
RINGATTN_NARROW_WGMMA(__nv_bfloat16, "bf16")
RINGATTN_NARROW_WGMMA(__half, "f16")
#undef RINGATTN_NARROW_WGMMA

template <class Element_, FewRowsConfig kConfig>
struct FewRows {
  using Element = Element_;
  static constexpr bool kGated = kConfig.gated;
  static constexpr int kRows = kConfig.rows;
  static constexpr int kBlocks = kRows / 8;  // of 8 rows
  static constexpr int kMatrices = kConfig.matrices();
  static constexpr int kColumns = kConfig.columns();
  static constexpr int kConsumers = kWarpgroup * kConfig.warpgroups;  // threads
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kStages = kConfig.stages();
  static constexpr int kWeightBytes = kConfig.weight_bytes();  // per stage; its rows follow
  static constexpr int kStageBytes = kConfig.stage_bytes();
  static constexpr int kSharedBytes = kConfig.shared_bytes();
  static constexpr int kMatrixBytes = 64 * cuda::kPanelRowBytes;  // 64 columns of a stage's matrix
};

template <class C>
struct FewRowsMemory {
  std::uint32_t base;  // aligned to 1,024 bytes, as the 128-byte swizzle requires

  __device__ __forceinline__ std::uint32_t weights(std::uint32_t stage) const { return base + stage * C::kStageBytes; }
  __device__ __forceinline__ std::uint32_t rows(std::uint32_t stage) const { return weights(stage) + C::kWeightBytes; }
  __device__ __forceinline__ std::uint32_t full(std::uint32_t stage) const {
    return base + C::kStages * C::kStageBytes + stage * kBarrierBytes;
  }
  __device__ __forceinline__ std::uint32_t empty(std::uint32_t stage) const { return full(C::kStages + stage); }
};

// tma_load_box() with the L2 policy evict_first.
__device__ __forceinline__ void tma_load_box_once(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                                  int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5, %5}], [%2], %6;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "l"(kReadOnce)
      : "memory");
}

__device__ __forceinline__ int blocks_of(const cuda::LinearChains& chains, int chain) {
  return (chains.end(chain) - chains.begin(chain) + cuda::kPanelColumns - 1) / cuda::kPanelColumns;
}

// A chain of a tile.
struct ChainOfTile {
  int tile, chain;
};

// The first chain of a CTA: the first one that begins at its share of the K blocks of all tiles, or later.
__device__ __forceinline__ ChainOfTile first_chain(const FewRowsParams& p, int cta) {
  const auto all = static_cast<std::int64_t>(p.tiles) * p.tile_blocks;
  const std::int64_t share = all * cta / gridDim.x;
  const int tile = static_cast<int>(share / p.tile_blocks);
  const int in_tile = static_cast<int>(share % p.tile_blocks);
  int chain = 0;
  for (int begin = 0; chain < p.gemm.chains.count && begin < in_tile; ++chain) begin += blocks_of(p.gemm.chains, chain);
  return chain < p.gemm.chains.count ? ChainOfTile{tile, chain} : ChainOfTile{tile + 1, 0};
}
// The CTA that has the tile's first chain.
__device__ __forceinline__ int first_cta_of(const FewRowsParams& p, int tile) {
  const auto all = static_cast<std::int64_t>(p.tiles) * p.tile_blocks;
  return static_cast<int>(((static_cast<std::int64_t>(tile) * p.tile_blocks + 1) * gridDim.x - 1) / all);
}

// Where the sums of a tile that CTAs share are: of the tiles that begin in a CTA, only the last is shared.
__device__ __forceinline__ int slot_of(const FewRowsParams& p, int tile) {
  return p.tiles <= static_cast<int>(gridDim.x) ? tile : first_cta_of(p, tile);
}

// Calls visit(tile, first chain, end) for the tiles of which this CTA has chains.
template <class Visit>
__device__ __forceinline__ void for_each_shared_tile(const FewRowsParams& p, Visit visit) {
  const ChainOfTile begin = first_chain(p, static_cast<int>(blockIdx.x));
  const ChainOfTile end = first_chain(p, static_cast<int>(blockIdx.x) + 1);
  for (int tile = begin.tile; tile < p.tiles && tile <= end.tile; ++tile) {
    const int first = tile == begin.tile ? begin.chain : 0;
    const int last = tile == end.tile ? end.chain : p.gemm.chains.count;
    if (first < last) visit(tile, first, last);
  }
}

// One thread.
template <class C>
__device__ __forceinline__ void load_few_rows(const FewRowsParams& p, const FewRowsMemory<C>& memory) {
  PackedPipelineState<C::kStages> ring;
  for_each_shared_tile(p, [&](int tile, int first, int last) {
    for (int chain = first; chain < last; ++chain) {
      const int end = p.gemm.chains.end(chain);
      for (int k = p.gemm.chains.begin(chain); k < end; k += cuda::kPanelColumns, ring.advance()) {
        const std::uint32_t stage = ring.stage();
        const std::uint32_t full = memory.full(stage);
        barrier_wait(memory.empty(stage), ring.parity() ^ 1U);
        barrier_arrive_expect(full, C::kStageBytes);
#pragma unroll
        for (int i = 0; i < C::kWeightBytes / C::kMatrixBytes; ++i) {
          tma_load_box_once(memory.weights(stage) + static_cast<std::uint32_t>(i * C::kMatrixBytes),
                            &p.weights[C::kGated ? i % 2 : 0], full, k,
                            tile * C::kColumns + (C::kGated ? i / 2 : i) * 64);
        }
        tma_load_box(memory.rows(stage), &p.x, full, k, 0, 0);
      }
    }
  });
}

// Totals of a tile's chains in registers, of splits or, where `leaves`, by the tree.
template <class C>
struct FewRowsFold {
  static constexpr int kBlocks = C::kBlocks * C::kMatrices;
  cuda::LinearFold<kBlocks, !C::kGated> fold;

  __device__ __forceinline__ void start() { fold.start(); }
  __device__ __forceinline__ void add(bool leaves, int chain, bool is_empty, const float (&sums)[kBlocks][4]) {
    if constexpr (C::kGated) {
      fold.add(chain, is_empty, sums);
    } else if (leaves) {
      fold.add(chain, is_empty, sums);
    } else {
      cuda::add_sums(fold.eight, sums);
    }
  }
  __device__ __forceinline__ const float (&total(bool leaves, int chains))[kBlocks][4] {
    return fold.total(leaves ? chains : kLinearLeaves);
  }
};

// y or sums of a tile. Register layout: element e of block j is of column e / 2 · 8 and row 8 · j + e % 2 further on.
template <class C, class Activation>
__device__ __forceinline__ void store_few_rows(const FewRowsParams& p, int column, int row,
                                               const float (&total)[C::kBlocks * C::kMatrices][4],
                                               Activation activation) {
  using Element = typename C::Element;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int n = column + half * 8;
    if (n >= p.gemm.columns) return;
    const float bias = cuda::load_bias<Element>(p.gemm.bias[0], n);
    const float up_bias = C::kGated ? cuda::load_bias<Element>(p.gemm.bias[1], n) : -0.0F;
#pragma unroll
    for (int block = 0; block < C::kBlocks; ++block) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int m = row + block * 8 + e;
        if (m >= p.gemm.rows) continue;
        char* const to = p.gemm.out + m * p.gemm.out_stride;
        const float sum = total[block][2 * half + e];
        if (!C::kGated && p.gemm.writes_sums) {
          reinterpret_cast<float*>(to)[n] = sum;
          continue;
        }
        float y = activation(__fadd_rn(sum, bias));
        if constexpr (C::kGated) y = __fmul_rn(y, __fadd_rn(total[C::kBlocks + block][2 * half + e], up_bias));
        reinterpret_cast<std::uint16_t*>(to)[n] = cuda::round_element<Element>(y);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void multiply_few_rows(const FewRowsParams& p, const FewRowsMemory<C>& memory,
                                                  volatile std::uint32_t& is_last) {
  using Element = typename C::Element;
  constexpr int kAllBlocks = C::kBlocks * C::kMatrices;
  const int thread = thread_of_cta();
  const int warpgroup = thread / kWarpgroup;
  const int lane = thread % 32;
  const auto release = [&](std::uint32_t stage) {
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.empty(stage));
  };
  const cuda::LinearChains& chains = p.gemm.chains;
  PackedPipelineState<C::kStages> ring;
  float sums[C::kMatrices][C::kBlocks][4];
  const auto& all_sums = reinterpret_cast<const float(&)[kAllBlocks][4]>(sums);
  for_each_shared_tile(p, [&](int tile, int first, int last) {
    const bool is_whole = first == 0 && last == chains.count;
    FewRowsFold<C> fold;
    fold.start();
    // Sums of a chain of the tile that this thread has, float4s that are kConsumers apart.
    const auto sums_of = [&](int chain) {
      const auto index = static_cast<std::int64_t>(slot_of(p, tile)) * chains.count + chain;
      return p.sums + index * (kAllBlocks * C::kConsumers) + thread;
    };
#pragma unroll 1
    for (int chain = first; chain < last; ++chain) {
      const int begin = chains.begin(chain);
      const int end = chains.end(chain);
      std::uint32_t previous = 0;
      const auto operands = [&](std::uint32_t stage) {
        const std::uint32_t weights =
            memory.weights(stage) + static_cast<std::uint32_t>(warpgroup * C::kMatrices * C::kMatrixBytes);
        return uint2{warp_uniform(descriptor_low(weights)), warp_uniform(descriptor_low(memory.rows(stage)))};
      };
      const auto multiply = [&](const uint2& at, std::uint32_t step, bool accumulate) {
#pragma unroll
        for (int m = 0; m < C::kMatrices; ++m) {
          Wgmma<Element, C::kRows>::ss(
              sums[m], descriptor(at.x + static_cast<std::uint32_t>(m * C::kMatrixBytes >> 4) + step * 2),
              descriptor(at.y + step * 2), accumulate);
        }
      };
      const auto pin_all = [&] {
#pragma unroll
        for (int m = 0; m < C::kMatrices; ++m) pin(sums[m]);
      };
      const int whole_end = begin + (end - begin) / cuda::kPanelColumns * cuda::kPanelColumns;
#pragma unroll 1
      for (int k = begin; k < whole_end; k += cuda::kPanelColumns, ring.advance()) {
        const std::uint32_t stage = ring.stage();
        barrier_wait(memory.full(stage), ring.parity());
        const uint2 at = operands(stage);
        pin_all();
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
      pin_all();
      if (begin < whole_end) release(previous);
      if (whole_end < end) {
        const std::uint32_t stage = ring.stage();
        barrier_wait(memory.full(stage), ring.parity());
        const uint2 at = operands(stage);
#pragma unroll 1
        for (int step = 0; step * 16 < end - whole_end; ++step) {
          pin_all();
          wgmma_fence();
          multiply(at, static_cast<std::uint32_t>(step), begin < whole_end || step > 0);
          wgmma_commit();
          wgmma_wait<0>();
          pin_all();
        }
        release(stage);
        ring.advance();
      }
      if (is_whole) {
        fold.add(chains.leaves, chain, begin == end, all_sums);
      } else if (begin < end) {
        float4* const to = sums_of(chain);
#pragma unroll
        for (int i = 0; i < kAllBlocks; ++i) {
          __stcg(to + i * C::kConsumers, make_float4(all_sums[i][0], all_sums[i][1], all_sums[i][2], all_sums[i][3]));
        }
      }
    }
    if (!is_whole) {
      __threadfence();
      named_sync(1, C::kConsumers);
      if (thread == 0) {
        std::uint32_t* const counter = p.counters + slot_of(p, tile);
        const auto mine = static_cast<std::uint32_t>(last - first);
        const bool completes = atomicAdd(counter, mine) + mine == static_cast<std::uint32_t>(chains.count);
        if (completes) *counter = 0;  // for the next launch
        __threadfence();
        is_last = completes;
      }
      named_sync(1, C::kConsumers);
      if (is_last == 0) return;
#pragma unroll 1
      for (int chain = 0; chain < chains.count; ++chain) {
        const bool is_empty = chains.begin(chain) == chains.end(chain);
        float found[kAllBlocks][4];
        const float4* const from = sums_of(chain);
#pragma unroll
        for (int i = 0; i < kAllBlocks; ++i) {
          const float4 four = is_empty ? float4{} : __ldcg(from + i * C::kConsumers);
          found[i][0] = four.x;
          found[i][1] = four.y;
          found[i][2] = four.z;
          found[i][3] = four.w;
        }
        fold.add(chains.leaves, chain, is_empty, found);
      }
    }
    const auto& total = fold.total(chains.leaves, chains.count);
    const int column = tile * C::kColumns + warpgroup * 64 + tile_row_of_thread();
    cuda::with_activation<C::kGated>(
        p.gemm.activation, [&](auto activation) { store_few_rows<C>(p, column, lane % 4 * 2, total, activation); });
  });
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) few_rows_kernel(const __grid_constant__ FewRowsParams p) {
  extern __shared__ unsigned char shared[];
  __shared__ std::uint32_t is_last;
  const FewRowsMemory<C> memory{cuda::aligned_shared_address<1024>(shared)};
  if (threadIdx.x == 0) {
    for (std::uint32_t stage = 0; stage < C::kStages; ++stage) {
      barrier_init(memory.full(stage), 1);
      barrier_init(memory.empty(stage), C::kConsumers / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  cuda::pdl_launch_dependents();
  cuda::pdl_wait();
  if (static_cast<int>(threadIdx.x) < C::kConsumers) {
    multiply_few_rows<C>(p, memory, is_last);
  } else {
    if (threadIdx.x % 32 == 0) load_few_rows<C>(p, memory);
  }
}

}  // namespace ringattn::sm90
