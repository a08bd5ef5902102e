// SPDX-License-Identifier: Apache-2.0
// Linear layers with wgmma, for up to 64 rows. Weights, which are read once, are operand A, and x is operand B. CTAs
// are persistent: each has a contiguous range of (tile of columns, chain of K), with about as many bytes as the others.
// If a CTA has all chains of a tile, the sums stay in registers. If CTAs share a tile, each chain's sum goes to memory,
// and the last CTA adds them in their order.
#pragma once

#include <cstdint>

#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma.cuh"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/fold.cuh"
#include "kernels/linear/sm90/linear_kernels.hpp"
#include "kernels/linear/sm90/matrix_tma.cuh"

namespace ringattn::sm90 {

// The two narrowest forms, used only for few rows: D[64, n] ← A[64, 16] · B[16, n] + D, both operands in shared memory.
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
  static constexpr bool kGated = kConfig.gated, kLeaves = kConfig.leaves;
  static constexpr int kRows = kConfig.rows;
  static constexpr int kBlocks = kRows / 8;  // of 8 rows
  static constexpr int kMatrices = kConfig.matrices();
  static constexpr int kCluster = kConfig.cluster();
  static constexpr int kRowBytes = kConfig.row_bytes();  // per stage, after its weights
  // For kMaxThreads threads, rounded up to 384: registers are allocated to four warps at a time.
  static constexpr int kRegisters = 168;
  static_assert((FewRowsConfig::kMaxThreads + 127) / 128 * 128 * kRegisters <= 65536);
};

// Pipeline stages in shared memory and their barriers.
template <class C>
struct FewRowsMemory {
  std::uint32_t base;  // aligned to 1,024 bytes, as the 128-byte swizzle requires
  std::uint32_t matrix_bytes;
  std::uint32_t stages;

  __device__ __forceinline__ FewRowsMemory(const FewRowsParams& p, const unsigned char* shared)
      : base(cuda::aligned_shared_address<1024>(shared)),
        matrix_bytes(static_cast<std::uint32_t>(p.tile_columns * cuda::kPanelRowBytes)),
        stages(static_cast<std::uint32_t>(p.stages)) {}
  __device__ __forceinline__ std::uint32_t stage_bytes() const { return C::kMatrices * matrix_bytes + C::kRowBytes; }
  __device__ __forceinline__ std::uint32_t weights(std::uint32_t stage) const { return base + stage * stage_bytes(); }
  __device__ __forceinline__ std::uint32_t rows(std::uint32_t stage) const {
    return weights(stage) + C::kMatrices * matrix_bytes;
  }
  __device__ __forceinline__ std::uint32_t full(std::uint32_t stage) const {
    return base + stages * stage_bytes() + FewRowsConfig::kUnusedBytes + stage * kBarrierBytes;
  }
  __device__ __forceinline__ std::uint32_t empty(std::uint32_t stage) const { return full(stages + stage); }
};

// The next stage of a ring, and the parity of its phase.
struct RingState {
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance(std::uint32_t stages) {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1U;
  }
};

__device__ __forceinline__ int blocks_of(const cuda::LinearChains& chains, int chain) {
  return (chains.end(chain) - chains.begin(chain) + cuda::kPanelColumns - 1) / cuda::kPanelColumns;
}

// A chain of a tile.
struct ChainOfTile {
  int tile, chain;
};

// The first chain of a CTA, out of `ctas`: the first one that begins at or after the start of its share of the K blocks
// of all tiles.
__device__ __forceinline__ ChainOfTile first_chain(const FewRowsParams& p, int cta, int ctas) {
  if (!p.shares_tiles) return {static_cast<int>(static_cast<std::int64_t>(p.tiles) * cta / ctas), 0};
  const auto all = static_cast<std::int64_t>(p.tiles) * p.tile_blocks;
  const std::int64_t share = all * cta / ctas;
  const int tile = static_cast<int>(share / p.tile_blocks);
  const int in_tile = static_cast<int>(share % p.tile_blocks);
  int chain = 0;
  for (int begin = 0; chain < p.gemm.chains.count && begin < in_tile; ++chain) begin += blocks_of(p.gemm.chains, chain);
  return chain < p.gemm.chains.count ? ChainOfTile{tile, chain} : ChainOfTile{tile + 1, 0};
}
// The CTA that has the tile's first chain.
__device__ __forceinline__ int first_cta_of(const FewRowsParams& p, int tile, int ctas) {
  const auto all = static_cast<std::int64_t>(p.tiles) * p.tile_blocks;
  return static_cast<int>(((static_cast<std::int64_t>(tile) * p.tile_blocks + 1) * ctas - 1) / all);
}

// Index in FewRowsParams::sums of a tile that CTAs share. Of the tiles that begin in a CTA, only the last is shared.
// The CTAs of a cluster have adjacent tiles, and the same chains.
template <class C>
__device__ __forceinline__ int slot_of(const FewRowsParams& p, int tile) {
  const int ctas = static_cast<int>(gridDim.x) / C::kCluster;
  const int slot = p.tiles <= ctas ? tile : first_cta_of(p, tile, ctas);
  return slot * C::kCluster + static_cast<int>(blockIdx.x) % C::kCluster;
}

// Calls visit(tile or pair, first chain, end) for the tiles that this CTA has chains of.
template <class C, class Visit>
__device__ __forceinline__ void for_each_shared_tile(const FewRowsParams& p, Visit visit) {
  const int cta = static_cast<int>(blockIdx.x) / C::kCluster;
  const int ctas = static_cast<int>(gridDim.x) / C::kCluster;
  const ChainOfTile begin = first_chain(p, cta, ctas);
  const ChainOfTile end = first_chain(p, cta + 1, ctas);
  for (int tile = begin.tile; tile < p.tiles && tile <= end.tile; ++tile) {
    const int first = tile == begin.tile ? begin.chain : 0;
    const int last = tile == end.tile ? end.chain : p.gemm.chains.count;
    if (first < last) visit(tile, first, last);
  }
}
// The first column of y of this CTA's tile.
template <class C>
__device__ __forceinline__ int column_of(const FewRowsParams& p, int tile) {
  return (tile * C::kCluster + static_cast<int>(blockIdx.x) % C::kCluster) * p.tile_columns;
}

// Called by one thread. The first weights are prefetched before the previous kernels are done.
template <class C>
__device__ __forceinline__ void load_few_rows(const FewRowsParams& p, const FewRowsMemory<C>& memory) {
  RingState ring;
  const std::uint32_t rank = static_cast<std::uint32_t>(blockIdx.x) % C::kCluster;
  bool waits = true;
  for_each_shared_tile<C>(p, [&](int tile, int first, int last) {
    const int column = column_of<C>(p, tile);
    for (int chain = first; chain < last; ++chain) {
      const int begin = p.gemm.chains.begin(chain);
      const int end = p.gemm.chains.end(chain);
      if (waits) {
        const int prefetched = min(end, begin + p.prefetched_blocks * cuda::kPanelColumns);
        for (int k = begin; k < prefetched; k += cuda::kPanelColumns) {
#pragma unroll
          for (int m = 0; m < C::kMatrices; ++m) tma_prefetch_rows(&p.weights[m], k, column);
        }
        cuda::pdl_wait();
        waits = false;
      }
      for (int k = begin; k < end; k += cuda::kPanelColumns, ring.advance(memory.stages)) {
        const std::uint32_t full = memory.full(ring.stage);
        barrier_wait(memory.empty(ring.stage), ring.parity ^ 1U);
        barrier_arrive_expect(full, static_cast<int>(memory.stage_bytes()));
#pragma unroll
        for (int m = 0; m < C::kMatrices; ++m) {
          tma_load_rows_once(memory.weights(ring.stage) + static_cast<std::uint32_t>(m) * memory.matrix_bytes,
                             &p.weights[m], full, k, column);
        }
        if constexpr (C::kCluster == 1) {
          tma_load_rows(memory.rows(ring.stage), &p.x, full, k, 0);
        } else {
          tma_load_rows_to_pair(memory.rows(ring.stage) + rank * (C::kRowBytes / 2), &p.x, full, k,
                                static_cast<int>(rank) * (C::kRows / 2));
        }
      }
    }
  });
  cuda::pdl_launch_dependents();
}

// y or sums of a tile. Register layout: element e of block j is of column e / 2 · 8 and row 8 · j + e % 2 further on.
template <class C, class Activation>
__device__ __forceinline__ void store_few_rows(const FewRowsParams& p, int column, int end, int row,
                                               const float (&total)[C::kBlocks * C::kMatrices][4],
                                               Activation activation) {
  using Element = typename C::Element;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int n = column + half * 8;
    if (n >= end) return;
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
        if (C::kLeaves && p.gemm.writes_sums) {
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
  // A stage is released in both CTAs of a cluster, because both load into both.
  const std::uint32_t empty_at =
      C::kCluster == 1 ? memory.empty(0) : map_to_cta(memory.empty(0), static_cast<std::uint32_t>(lane & 1));
  const auto release = [&](std::uint32_t stage) {
    __syncwarp();
    if constexpr (C::kCluster == 1) {
      if (lane == 0) barrier_arrive(empty_at + stage * kBarrierBytes);
    } else {
      if (lane < 2) barrier_arrive_at(empty_at + stage * kBarrierBytes);
    }
  };
  const cuda::LinearChains& chains = p.gemm.chains;
  const int consumers = p.warpgroups * kWarpgroup;
  RingState ring;
  const std::uint32_t matrix_step = warp_uniform(memory.matrix_bytes >> 4);
  float sums[C::kMatrices][C::kBlocks][4];
  const auto& all_sums = reinterpret_cast<const float(&)[kAllBlocks][4]>(sums);
  const auto operands = [&](std::uint32_t stage) {
    const std::uint32_t weights =
        memory.weights(stage) + static_cast<std::uint32_t>(warpgroup * 64 * cuda::kPanelRowBytes);
    return uint2{warp_uniform(descriptor_low(weights)), warp_uniform(descriptor_low(memory.rows(stage)))};
  };
  // The next 16 of K are 32 bytes further in each row.
  const auto multiply = [&](const uint2& at, std::uint32_t step, bool accumulate) {
#pragma unroll
    for (int m = 0; m < C::kMatrices; ++m) {
      Wgmma<Element, C::kRows>::ss(sums[m], descriptor(at.x + static_cast<std::uint32_t>(m) * matrix_step + step * 2),
                                   descriptor(at.y + step * 2), accumulate);
    }
  };
  const auto pin_all = [&] {
#pragma unroll
    for (int m = 0; m < C::kMatrices; ++m) pin(sums[m]);
  };
  for_each_shared_tile<C>(p, [&](int tile, int first, int last) {
    const bool is_whole = first == 0 && last == chains.count;
    cuda::LinearFold<kAllBlocks, C::kLeaves> fold;
    fold.start();
    // Sums of a chain of the tile that this thread has, float4s that are `consumers` apart.
    const auto sums_of = [&](int chain) {
      const auto index = static_cast<std::int64_t>(slot_of<C>(p, tile)) * chains.count + chain;
      return p.sums + index * (kAllBlocks * consumers) + thread;
    };
#pragma unroll 1
    for (int chain = first; chain < last; ++chain) {
      const int begin = chains.begin(chain);
      const int end = chains.end(chain);
      const int whole_end = begin + (end - begin) / cuda::kPanelColumns * cuda::kPanelColumns;
      std::uint32_t previous = 0;
#pragma unroll 1
      for (int k = begin; k < whole_end; k += cuda::kPanelColumns, ring.advance(memory.stages)) {
        barrier_wait(memory.full(ring.stage), ring.parity);
        const uint2 at = operands(ring.stage);
        pin_all();
        wgmma_fence();
#pragma unroll
        for (std::uint32_t step = 0; step < 4; ++step) multiply(at, step, k > begin || step > 0);
        wgmma_commit();
        if (k > begin) {
          wgmma_wait<1>();
          release(previous);
        }
        previous = ring.stage;
      }
      wgmma_wait<0>();
      pin_all();
      if (begin < whole_end) release(previous);
      // A chain ends after a multiple of 16, or with zeros. The rest of the panel belongs to the next leaf.
      if (whole_end < end) {
        barrier_wait(memory.full(ring.stage), ring.parity);
        const uint2 at = operands(ring.stage);
#pragma unroll 1
        for (int step = 0; step * 16 < end - whole_end; ++step) {
          pin_all();
          wgmma_fence();
          multiply(at, static_cast<std::uint32_t>(step), begin < whole_end || step > 0);
          wgmma_commit();
          wgmma_wait<0>();
          pin_all();
        }
        release(ring.stage);
        ring.advance(memory.stages);
      }
      if (is_whole) {
        fold.add(chain, begin == end, all_sums);
      } else if (begin < end) {
        float4* const to = sums_of(chain);
#pragma unroll
        for (int i = 0; i < kAllBlocks; ++i) {
          __stcg(to + i * consumers, make_float4(all_sums[i][0], all_sums[i][1], all_sums[i][2], all_sums[i][3]));
        }
      }
    }
    if (!is_whole) {
      __threadfence();
      named_sync(1, consumers);
      if (thread == 0) {
        std::uint32_t* const counter = p.counters + slot_of<C>(p, tile);
        const auto mine = static_cast<std::uint32_t>(last - first);
        const bool completes = atomicAdd(counter, mine) + mine == static_cast<std::uint32_t>(chains.count);
        if (completes) *counter = 0;  // for the next launch
        __threadfence();
        is_last = completes;
      }
      named_sync(1, consumers);
      if (is_last == 0) return;
#pragma unroll 1
      for (int chain = 0; chain < chains.count; ++chain) {
        const bool is_empty = chains.begin(chain) == chains.end(chain);
        float found[kAllBlocks][4];
        const float4* const from = sums_of(chain);
#pragma unroll
        for (int i = 0; i < kAllBlocks; ++i) {
          const float4 four = is_empty ? float4{} : __ldcg(from + i * consumers);
          found[i][0] = four.x;
          found[i][1] = four.y;
          found[i][2] = four.z;
          found[i][3] = four.w;
        }
        fold.add(chain, is_empty, found);
      }
    }
    const auto& total = fold.total(chains.count);
    const int column = column_of<C>(p, tile);
    const int end = min(p.gemm.columns, column + p.tile_columns);
    cuda::with_activation<C::kGated>(p.gemm.activation, [&](auto activation) {
      store_few_rows<C>(p, column + warpgroup * 64 + tile_row_of_thread(), end, lane % 4 * 2, total, activation);
    });
  });
}

template <class C>
__global__ void __maxnreg__(C::kRegisters) few_rows_kernel(const __grid_constant__ FewRowsParams p) {
  extern __shared__ unsigned char shared[];
  __shared__ std::uint32_t is_last;
  const FewRowsMemory<C> memory(p, shared);
  const int consumers = p.warpgroups * kWarpgroup;
  if (threadIdx.x < memory.stages) {
    barrier_init(memory.full(threadIdx.x), 1);
    barrier_init(memory.empty(threadIdx.x), C::kCluster * consumers / 32);
    barrier_init_fence();
  }
  if constexpr (C::kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (static_cast<int>(threadIdx.x) < consumers) {
    cuda::pdl_wait();
    multiply_few_rows<C>(p, memory, is_last);
  } else {
    if (threadIdx.x % 32 == 0) load_few_rows<C>(p, memory);
  }
  // The other CTA writes to a CTA's memory and arrives at its barriers.
  if constexpr (C::kCluster > 1) cluster_sync();
}

}  // namespace ringattn::sm90
