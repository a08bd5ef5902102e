// SPDX-License-Identifier: Apache-2.0
// int4 linear layers for many rows of x with wgmma. CTAs are persistent and come in pairs, which share 128 rows of x by
// multicast. A producer warp loads half groups: x by TMA, W by bulk copies. Two warpgroups have 64 rows of W each, as
// operand A in registers (of a gated layer, the gate's and up's). While the tensor cores multiply one half of a group,
// the warpgroup dequantizes the next. The sum of the current group
// and the sum of the current split or leaf are in registers; finished splits, or the waiting leaf of the tree, in
// shared memory; larger subtrees in L2.
#pragma once

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma.cuh"
#include "kernels/linear/cuda/int4_operand.cuh"
#include "kernels/linear/cuda/quantized_finish.cuh"
#include "kernels/linear/sm90/int4.hpp"

namespace ringattn::sm90 {

template <class Element_>
struct ManyRowsInt4 {
  using Element = Element_;
  static constexpr int kConsumers = 2 * kWarpgroup;
  static constexpr int kThreads = kConsumers + kWarpgroup;
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kProducerRegisters = 48;
  static constexpr int kBarrier = 1;  // named barrier of the consumers
  static constexpr int kBlocks = kInt4ManyRows / 8;
  static constexpr int kRowGroup = 8;  // tiles of rows that share columns of W in L2
  // A stage: half a group of x, and of each warpgroup's codes; with the first half the scales and zeros.
  static constexpr int kXBytes = kInt4ManyRows * 128;
  static constexpr int kHalfCodes = cuda::kInt4CodeBytes / 2;
  static constexpr int kNumbers = cuda::kInt4UsedBytes - cuda::kInt4CodeBytes;
  static constexpr int kWeightBytes = kHalfCodes + kNumbers;  // of a warpgroup
  static constexpr int kStageBytes = (kXBytes + 2 * kWeightBytes + 1023) / 1024 * 1024;
  static constexpr int kWaitingBytes = kInt4ManyRows * 128 * 4;  // sums of finished splits; at the end, staged sums
  static constexpr int kStages = (227 * 1024 - 1024 - kWaitingBytes) / (kStageBytes + 2 * kBarrierBytes);
  static constexpr int kSharedBytes =
      cuda::aligned_shared_bytes(kStages * (kStageBytes + 2 * kBarrierBytes) + kWaitingBytes, 1024);
  static constexpr int kStagedRows = 64;
  static_assert(kStagedRows * cuda::kStagedRow * 4 <= kWaitingBytes);
};

template <class C>
struct Int4Shared {
  std::uint32_t base;

  __device__ __forceinline__ std::uint32_t x(std::uint32_t stage) const { return base + stage * C::kStageBytes; }
  __device__ __forceinline__ std::uint32_t weights(std::uint32_t stage, int warpgroup) const {
    return x(stage) + C::kXBytes + static_cast<std::uint32_t>(warpgroup * C::kWeightBytes);
  }
  __device__ __forceinline__ std::uint32_t waiting() const { return base + C::kStages * C::kStageBytes; }
  __device__ __forceinline__ std::uint32_t full(std::uint32_t stage) const {
    return waiting() + C::kWaitingBytes + stage * kBarrierBytes;
  }
  __device__ __forceinline__ std::uint32_t empty(std::uint32_t stage) const { return full(stage + C::kStages); }
};

struct Int4Tile {
  int first_row, column_tile;
};

template <class C>
__device__ __forceinline__ int int4_pair_tiles(const HopperInt4& p) {
  return p.row_tiles * ((p.column_tiles + 1) / 2);
}
// number: of the pair's tile.
template <class C>
__device__ __forceinline__ Int4Tile int4_tile(const HopperInt4& p, int number) {
  const int columns = (p.column_tiles + 1) / 2;
  const int group = number / (C::kRowGroup * columns);
  const int rows = min(C::kRowGroup, p.row_tiles - group * C::kRowGroup);
  const int in_group = number % (C::kRowGroup * columns);
  return {(group * C::kRowGroup + in_group % rows) * kInt4ManyRows,
          in_group / rows * 2 + static_cast<int>(rank_in_cluster())};
}

template <class C>
__device__ __forceinline__ void produce_int4(const HopperInt4& p, const Int4Shared<C>& shared, int first, int step) {
  const cuda::Int4Gemm& gemm = p.gemm;
  const int groups = gemm.chains.features / static_cast<int>(kInt4Group);
  const int last_row_tile = static_cast<int>(cuda::int4_row_tiles(gemm.out.columns)) - 1;
  const auto half_of_x = static_cast<std::uint32_t>(static_cast<int>(rank_in_cluster()) * (kInt4ManyRows / 2));
  PackedPipelineState<C::kStages> ring;
  for (int number = first; number < int4_pair_tiles<C>(p); number += step) {
    const Int4Tile tile = int4_tile<C>(p, number);
    const char* block[2];  // of the warpgroups. A tile past the last column repeats the last rows of W.
    for (int w = 0; w < 2; ++w) {
      const int matrix = gemm.out.matrices == 2 ? w : 0;
      const int row_tile = gemm.out.matrices == 2 ? tile.column_tile : tile.column_tile * 2 + w;
      block[w] = cuda::int4_block(gemm, matrix, min(row_tile, last_row_tile), 0);
    }
    for (int half = 0; half < 2 * groups; ++half, ring.advance()) {
      const std::uint32_t stage = ring.stage();
      const bool is_first = half % 2 == 0;
      barrier_wait(shared.empty(stage), ring.parity() ^ 1U);
      barrier_arrive_expect(shared.full(stage), C::kXBytes + 2 * (is_first ? C::kWeightBytes : C::kHalfCodes));
      tma_multicast_box(3, shared.x(stage) + half_of_x * 128, &p.x, shared.full(stage), half * kInt4PanelColumns, 0,
                        tile.first_row + static_cast<int>(half_of_x));
      for (int w = 0; w < 2; ++w) {
        const std::uint32_t to = shared.weights(stage, w);
        tma_load_bytes(to, block[w] + (is_first ? 0 : C::kHalfCodes), C::kHalfCodes, shared.full(stage));
        if (is_first) {
          tma_load_bytes(to + C::kHalfCodes, block[w] + cuda::kInt4CodeBytes, C::kNumbers, shared.full(stage));
        } else {
          block[w] += cuda::kInt4BlockBytes;
        }
      }
    }
  }
}

template <class C>
class Int4Consumer {
 public:
  __device__ __forceinline__ Int4Consumer(const HopperInt4& params, const Int4Shared<C>& shared)
      : p_(params),
        shared_(shared),
        warpgroup_(thread_of_cta() / kWarpgroup),
        empty_(map_to_cta(shared.empty(0), static_cast<std::uint32_t>(thread_of_cta() & 1))) {}

  __device__ __forceinline__ void run(int first, int step) {
    for (int number = first; number < int4_pair_tiles<C>(p_); number += step) add_tile(int4_tile<C>(p_, number));
  }

 private:
  using Element = typename C::Element;
  using Operands = std::uint32_t[4][4];  // of half a group
  using Sums = float[C::kBlocks][4];

  // Lane i releases stages of the pair's i-th CTA.
  __device__ __forceinline__ void release_stage(std::uint32_t stage) const {
    __syncwarp();
    if (thread_of_cta() % 32 < 2) barrier_arrive_at(empty_ + stage * kBarrierBytes);
  }

  // The first half of a group is loaded together with its scales and zeros.
  __device__ __forceinline__ void load_numbers(std::uint32_t stage) {
    const std::uint32_t numbers = shared_.weights(stage, warpgroup_) + C::kHalfCodes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto at = static_cast<std::uint32_t>(tile_row_of_thread() + 8 * i);
      next_scale_[i] = __int_as_float(cuda::load_shared_number(numbers + 4 * at));
      zeros_[i] = cuda::int4_zero_pair<Element>(
          cuda::load_shared_byte(numbers + cuda::kInt4ZerosAt - cuda::kInt4ScalesAt + at));
    }
  }
  __device__ __forceinline__ void dequantize(Operands& a, std::uint32_t stage) const {
    const uint4 codes = cuda::load_shared_16(shared_.weights(stage, warpgroup_) +
                                             static_cast<std::uint32_t>(thread_of_warpgroup() * 16));
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) cuda::int4_operand<Element>(a[i], words[i], zeros_);
  }
  __device__ __forceinline__ void multiply_half(Sums& sums, const Operands& a, std::uint32_t stage,
                                                bool from_zero) const {
    const std::uint32_t b = warp_uniform(descriptor_low(shared_.x(stage)));
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Wgmma<Element, kInt4ManyRows>::rk(sums, a[step], descriptor(b + static_cast<std::uint32_t>(2 * step)),
                                        step > 0 || !from_zero);
    }
    wgmma_commit();
  }
  // Waits for the next half group, and dequantizes it. Returns its stage.
  __device__ __forceinline__ std::uint32_t acquire_half(Operands& a, bool is_first) {
    const std::uint32_t stage = ring_.stage();
    barrier_wait(shared_.full(stage), ring_.parity());
    ring_.advance();
    if (is_first) load_numbers(stage);
    dequantize(a, stage);
    return stage;
  }

  __device__ __forceinline__ void add_tile(const Int4Tile& tile) {
    const cuda::LinearChains& chains = p_.gemm.chains;
    const int groups = chains.features / static_cast<int>(kInt4Group);
    Sums acc;  // of the current chain
    fill(acc, 0.0F);
    Operands first, second;
    std::uint32_t first_stage = acquire_half(first, true);
    int chain = 0;
    for (int group = 0;; ++group) {
      while (chain < chains.count && chains.end(chain) == group * static_cast<int>(kInt4Group)) {
        close_chain(tile, chain, acc);
        ++chain;
      }
      if (group == groups) break;
      const float scale[2] = {next_scale_[0], next_scale_[1]};
      Sums sums;
      pin(sums);
      wgmma_fence();
      multiply_half(sums, first, first_stage, true);
      const std::uint32_t second_stage = acquire_half(second, false);
      wgmma_fence();
      multiply_half(sums, second, second_stage, false);
      wgmma_wait<1>();
      release_stage(first_stage);
      if (group + 1 < groups) first_stage = acquire_half(first, true);
      wgmma_wait<0>();
      pin(sums);
      release_stage(second_stage);
#pragma unroll
      for (int j = 0; j < C::kBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[j][i] = __fmaf_rn(scale[i / 2], sums[j][i], acc[j][i]);
      }
    }
  }

  __device__ __forceinline__ static void fill(Sums& acc, float value) {
#pragma unroll
    for (int j = 0; j < C::kBlocks; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] = value;
    }
  }

  // Memory of this thread for sums that wait: of splits, or of subtrees of 1, 2 and 4 leaves. Four sums each kConsumers
  // · 16 bytes.
  __device__ __forceinline__ float4* waiting(int level) const {
    if (level == 0) {
      return static_cast<float4*>(__cvta_shared_to_generic(shared_.waiting())) + thread_of_cta();
    }
    return reinterpret_cast<float4*>(p_.gemm.partials) +
           (std::int64_t{blockIdx.x} * 2 + level - 1) * (C::kWaitingBytes / 16) + thread_of_cta();
  }

  // Adds the sums of a chain to those before it, and finishes the tile with the last. acc is zero afterwards.
  __device__ __forceinline__ void close_chain(const Int4Tile& tile, int chain, Sums& acc) {
    const cuda::LinearChains& chains = p_.gemm.chains;
    if (chains.begin(chain) == chains.end(chain)) fill(acc, -0.0F);  // nothing: changes no other sum
    const int merges = chains.leaves ? __ffs(~chain) - 1 : (chain > 0 ? 1 : 0);
#pragma unroll 1
    for (int level = 0; level < merges; ++level) {
      const float4* const before = waiting(level);
#pragma unroll
      for (int j = 0; j < C::kBlocks; ++j) {
        const float4 sum = before[j * C::kConsumers];
        acc[j][0] = __fadd_rn(sum.x, acc[j][0]);
        acc[j][1] = __fadd_rn(sum.y, acc[j][1]);
        acc[j][2] = __fadd_rn(sum.z, acc[j][2]);
        acc[j][3] = __fadd_rn(sum.w, acc[j][3]);
      }
    }
    if (chain + 1 < chains.count) {
      float4* const to = waiting(chains.leaves ? merges : 0);
#pragma unroll
      for (int j = 0; j < C::kBlocks; ++j) to[j * C::kConsumers] = {acc[j][0], acc[j][1], acc[j][2], acc[j][3]};
    } else {
      finish(tile, acc);
    }
    fill(acc, 0.0F);
  }

  __device__ __forceinline__ void finish(const Int4Tile& tile, const Sums& acc) const {
    const cuda::QuantizedOutput& out = p_.gemm.out;
    const int columns = out.columns_of_tile(128);
    const int rows = min(kInt4ManyRows, out.rows - tile.first_row);
    const int lane = thread_of_cta() % 32;
    const std::uint32_t mine =
        shared_.waiting() +
        static_cast<std::uint32_t>(4 * (warpgroup_ * 64 + tile_row_of_thread() + lane % 4 * 2 * cuda::kStagedRow));
#pragma unroll 1
    for (int staged = 0; staged < kInt4ManyRows; staged += C::kStagedRows) {
      named_sync(C::kBarrier, C::kConsumers);  // no thread reads the previous contents any more
#pragma unroll
      for (int part = 0; part < kInt4ManyRows; part += C::kStagedRows) {
        if (part != staged) continue;  // registers have no index
#pragma unroll
        for (int j = 0; j < C::kStagedRows / 8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            cuda::store_shared(mine + static_cast<std::uint32_t>(4 * ((8 * j + i % 2) * cuda::kStagedRow + i / 2 * 8)),
                               __float_as_uint(acc[part / 8 + j][i]));
          }
        }
      }
      named_sync(C::kBarrier, C::kConsumers);
      cuda::finish_float_tile<C::kConsumers>(
          out, tile.first_row + staged, min(C::kStagedRows, rows - staged), tile.column_tile * columns, columns,
          thread_of_cta(), [&](int row, int at) {
            const uint4 four =
                cuda::load_shared_16(shared_.waiting() + static_cast<std::uint32_t>(4 * (row * cuda::kStagedRow + at)));
            return float4{__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z),
                          __uint_as_float(four.w)};
          });
    }
    named_sync(C::kBarrier, C::kConsumers);
  }

  const HopperInt4& p_;
  const Int4Shared<C>& shared_;
  int warpgroup_;
  std::uint32_t empty_;  // of the first stage, in the CTA that this lane releases
  PackedPipelineState<C::kStages> ring_;
  float next_scale_[2];     // of the group whose first half was dequantized last
  std::uint32_t zeros_[2];  // pairs, of the same group
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) int4_many_rows_kernel(const __grid_constant__ HopperInt4 params) {
  extern __shared__ unsigned char int4_many_dynamic[];
  const Int4Shared<C> shared{cuda::aligned_shared_address<1024>(int4_many_dynamic)};
  if (threadIdx.x == 0) {
    for (std::uint32_t stage = 0; stage < C::kStages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), 2 * C::kConsumers / 32);
    }
    barrier_init_fence();
  }
  cluster_sync();
  cuda::pdl_launch_dependents();
  cuda::pdl_wait();
  const int first = static_cast<int>(blockIdx.x) / 2;
  const int step = static_cast<int>(gridDim.x) / 2;
  if (static_cast<int>(threadIdx.x) < C::kConsumers) {
    reg_alloc<C::kConsumerRegisters>();
    Int4Consumer<C>(params, shared).run(first, step);
  } else {
    reg_dealloc<C::kProducerRegisters>();
    if (threadIdx.x / 32 == C::kConsumers / 32 && elect_one()) produce_int4<C>(params, shared, first, step);
    __syncwarp();
  }
  cluster_sync();  // the peer may still arrive at barriers of this CTA
}

}  // namespace ringattn::sm90
