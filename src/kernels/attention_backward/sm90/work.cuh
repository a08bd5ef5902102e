// SPDX-License-Identifier: Apache-2.0
// Code shared by the dQ kernel and the dK/dV kernel on Hopper: loads of tiles, the order of the consumers, and operands
// in registers.
#pragma once

#include <cstdint>

#include "kernels/attention/cuda/scaled_score.cuh"
#include "kernels/attention_backward/cuda/sums.cuh"
#include "kernels/attention_backward/sm90/backward_params.hpp"
#include "kernels/attention_backward/sm90/config.hpp"
#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/sm90/copy_rows.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/warpgroup_gemm.cuh"

namespace ringattn::sm90 {

using cuda::add_sum;
using cuda::common_tiles;
using cuda::finish_sum;
using cuda::first_column_of_thread;
using cuda::head_of;
using cuda::kNoWorkLeft;
using cuda::kPanelColumns;
using cuda::kPanelRowBytes;
using cuda::load_sum;
using cuda::mask_columns;
using cuda::pack_block;
using cuda::publish_work;
using cuda::RowTile;
using cuda::seen_columns;
using cuda::SeenColumns;
using cuda::sum_rows;
using cuda::SumEnd;
using cuda::SumRows;
using cuda::TileInterval;
using cuda::TileRun;

inline constexpr int kSharedAlignment = 1024;  // bytes, of tiles with the 128-byte swizzle
inline constexpr int kWarp = 32;
inline constexpr int kWarpsOfWarpgroup = kWarpgroup / kWarp;

// The producer writes the CTA's work, alternately into two slots. It overwrites a slot when the consumers are done with
// the work in the other slot, which is later.
using BackwardWork = cuda::BackwardWork<kBackwardConsumers>;
inline constexpr int kWorkSlots = 2;

// The number of the CTA's next work. Called by the producer warp.
__device__ __forceinline__ int take_work(const cuda::BackwardTables& tables) {
  int taken = 0;
  if (thread_of_cta() % kWarp == 0) taken = atomicAdd(tables.taken, 1);
  return static_cast<int>(gridDim.x + warp_uniform(static_cast<std::uint32_t>(taken)));
}

// The index of a consumer's head tile in BackwardSums::scratch.
__device__ __forceinline__ int scratch_tile(const cuda::BackwardTables& tables, const BackwardWork& work,
                                            int consumer) {
  const int pair = work.pair.partial == cuda::RowTilePair::kNoPartial
                       ? static_cast<int>(blockIdx.x)
                       : static_cast<int>(gridDim.x) + work.pair.partial * tables.kv_heads + work.kv_head;
  return pair * kBackwardConsumers + consumer;
}

// Loads all columns of a box's rows, panel after panel. `panel_bytes` are those of the tile.
template <int kDim>
__device__ __forceinline__ void load_rows(std::uint32_t target, int panel_bytes, const CUtensorMap& map,
                                          std::uint32_t barrier, int head, int row) {
  constexpr int kBox = BackwardConfig::box_columns(kDim);
#pragma unroll
  for (int column = 0; column < kDim; column += kBox) {
    tma_load_box(target + static_cast<std::uint32_t>(column / kPanelColumns * panel_bytes), &map, barrier, column, head,
                 row);
  }
}

// The same by the threads of a warp, for rows [begin, end) of a tile of kRows rows. The others become zeros. `row` is
// the tile's row 0.
template <int kRows, int kDim>
__device__ __forceinline__ void copy_tile_rows(std::uint32_t target, const cuda::StridedRows<const void>& rows,
                                               std::int64_t row, int head, int begin, int end) {
  constexpr std::int64_t kElementBytes = 2;
  const char* data =
      static_cast<const char*>(rows.data) + (row * rows.token_stride + head * rows.head_stride) * kElementBytes;
  copy_rows<kWarp>(target, {data, rows.token_stride * kElementBytes}, kDim, kRows, kRows, begin, end,
                   thread_of_cta() % kWarp);
}
// Makes a warp's writes of shared memory visible to wgmma, and arrives.
__device__ __forceinline__ void publish_tile(std::uint32_t barrier) {
  proxy_fence();
  __syncwarp();
  if (thread_of_cta() % kWarp == 0) barrier_arrive(barrier);
}

// Zeroes rows [0, begin) and [end, kRows) of a tile. They may hold values of other sequences, such as NaN, which must
// not be multiplied by zeros. Called by a warp after the tile has landed.
template <int kRows, int kDim>
__device__ __forceinline__ void zero_rows(std::uint32_t tile, int begin, int end) {
  constexpr int kPieceBytes = 16;
  constexpr int kPieces = kPanelRowBytes / kPieceBytes;  // of a row in a panel
  constexpr int kPanels = (kDim + kPanelColumns - 1) / kPanelColumns;
  const int lane = thread_of_cta() % kWarp;
#pragma unroll 1
  for (int i = lane; i < kPanels * kRows * kPieces; i += kWarp) {
    const int row = i / kPieces % kRows;
    if (row < begin || row >= end) {
      cuda::store_shared(tile + static_cast<std::uint32_t>(i * kPieceBytes), uint4{0, 0, 0, 0});
    }
  }
}

// The two consumers issue the GEMMs of scores in turn, so that one's exponentials overlap with the other's GEMMs. Each
// passes its turn once for each tile of the pair, also for one that it skips. Unless kTakesTurns, nothing waits.
template <bool kTakesTurns = true>
class PingPong {
 public:
  __device__ __forceinline__ explicit PingPong(int consumer) : consumer_(consumer) {}
  __device__ __forceinline__ void begin() const {
    if (consumer_ == 1) pass();
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (kTakesTurns) named_sync(kFirstBarrier + consumer_, kBackwardConsumers * kWarpgroup);
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (kTakesTurns) named_arrive(kFirstBarrier + 1 - consumer_, kBackwardConsumers * kWarpgroup);
  }
  __device__ __forceinline__ void end() const {
    if (consumer_ == 0) wait();
  }

 private:
  static constexpr int kFirstBarrier = 1;  // barrier 0 is __syncthreads()
  int consumer_;
};

// One lane of each warp arrives.
__device__ __forceinline__ void release_stage(std::uint32_t barrier) {
  if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
}

// ptxas serialises wgmma if it moves the packing below the fence of the GEMM that reads the fragments. Call this before
// that GEMM.
template <int kSteps>
__device__ __forceinline__ void keep_packed(const std::uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" ::"r"(a[step][i]) : "memory");
  }
}
// Keeps the registers from being reused until here, while a GEMM reads them.
template <int kSteps>
__device__ __forceinline__ void pin_packed(std::uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[step][i])::"memory");
  }
}

}  // namespace ringattn::sm90
