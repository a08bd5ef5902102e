// SPDX-License-Identifier: Apache-2.0
// What the dQ kernel and the dK/dV kernel share besides sums: the work of a CTA, the loop over its tiles, masks, and
// probabilities.
#pragma once

#include <cstdint>

#include "kernels/attention/cuda/scaled_score.cuh"
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

using cuda::kPanelColumns;
using cuda::kPanelRowBytes;
using cuda::RowTile;
using cuda::RowTilePair;
using cuda::TileRun;

inline constexpr int kSharedAlignment = 1024;  // bytes, of tiles with the 128-byte swizzle
inline constexpr int kWarp = 32;
inline constexpr int kWarpsOfWarpgroup = kWarpgroup / kWarp;
inline constexpr int kNoWorkLeft = -1;

// The work of a CTA, which the producer writes to shared memory. Two slots take turns: a slot is written again when the
// consumers are done with the work after it.
struct BackwardWork {
  RowTilePair pair;
  RowTile row_tiles[kBackwardConsumers];
  std::int32_t kv_head;  // or kNoWorkLeft
};
inline constexpr int kWorkSlots = 2;

template <class Table>
__device__ __forceinline__ void copy_words(Table& target, const Table& source) {
  auto* to = reinterpret_cast<std::uint32_t*>(&target);
  const auto* from = reinterpret_cast<const std::uint32_t*>(&source);
  constexpr int kWords = sizeof(Table) / sizeof(std::uint32_t);
  static_assert(kWords <= kWarp && sizeof(Table) % sizeof(std::uint32_t) == 0);
  const int lane = thread_of_cta() % kWarp;
  if (lane < kWords) to[lane] = from[lane];
}

// Called by the producer warp. False: there is no work with this number.
__device__ __forceinline__ bool publish_work(const cuda::BackwardTables& tables, int index, BackwardWork& work) {
  const bool any = index < tables.pair_count * tables.kv_heads;
  int kv_head = kNoWorkLeft;
  if (any) {
    const cuda::WorkIndex at = cuda::work_index(tables.pair_count, tables.kv_heads, tables.swizzle_heads, index);
    const RowTilePair& pair = tables.pairs[at.entry];
    copy_words(work.pair, pair);
#pragma unroll
    for (int consumer = 0; consumer < kBackwardConsumers; ++consumer) {
      const int next = (pair.head + consumer) / tables.group;
      copy_words(work.row_tiles[consumer], tables.row_tiles[pair.row_tile + (consumer < pair.count ? next : 0)]);
    }
    kv_head = at.head;
  }
  if (thread_of_cta() % kWarp == 0) work.kv_head = kv_head;
  __syncwarp();
  return any;
}

// The number of the CTA's next work. Called by the producer warp.
__device__ __forceinline__ int take_work(const cuda::BackwardTables& tables) {
  int taken = 0;
  if (thread_of_cta() % kWarp == 0) taken = atomicAdd(tables.taken, 1);
  return static_cast<int>(gridDim.x + warp_uniform(static_cast<std::uint32_t>(taken)));
}

// The query head of a consumer's head tile.
__device__ __forceinline__ int head_of(const cuda::BackwardTables& tables, const BackwardWork& work, int consumer) {
  return work.kv_head * tables.group + (work.pair.head + consumer) % tables.group;
}

// Tiles [begin, end) that a run of tiles has in common with a range.
struct TileInterval {
  int begin, end;
};
__device__ __forceinline__ TileInterval common_tiles(const TileRun& run, int begin, int end) {
  return {run.first_tile > begin ? run.first_tile : begin,
          run.first_tile + run.tiles < end ? run.first_tile + run.tiles : end};
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

// Zeroes rows [0, begin) and [end, kRows) of a tile, so that what other sequences have there, such as NaN, multiplies
// no zero. Called by a warp after the tile has landed.
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
// passes its turn once for each tile of the pair, also for one that it skips.
class PingPong {
 public:
  __device__ __forceinline__ explicit PingPong(int consumer) : consumer_(consumer) {}
  __device__ __forceinline__ void begin() const {
    if (consumer_ == 1) pass();
  }
  __device__ __forceinline__ void wait() const {
    named_sync(kFirstBarrier + consumer_, kBackwardConsumers * kWarpgroup);
  }
  __device__ __forceinline__ void pass() const {
    named_arrive(kFirstBarrier + 1 - consumer_, kBackwardConsumers * kWarpgroup);
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

// Columns of a tile that a thread's two rows see, relative to the thread's first column: [low, high[0]) of the first
// row, and [low + 8, high[1]) of the second, which is 8 rows below. The ranges may extend outside the tile.
struct SeenColumns {
  int low;
  int high[2];

  __device__ __forceinline__ bool has(int j, int e) const {
    const int column = j * 8 + e % 2;
    return column - e / 2 * 8 >= low && column < high[e / 2];
  }
};
__device__ __forceinline__ int first_column_of_thread() { return thread_of_cta() % 4 * 2; }
// The first row is at `offset`, and the tile's column 0 at `column`. Columns from `end` on belong to other sequences.
__device__ __forceinline__ SeenColumns seen_columns(const cuda::BackwardTables& tables, int offset, int column,
                                                    int end) {
  const int first = column + first_column_of_thread();
  const int to = offset + tables.right + 1;
  const int to_second = to + 8;
  return {offset - tables.left - first, {(to < end ? to : end) - first, (to_second < end ? to_second : end) - first}};
}
// Selects zero where a row does not see the column.
template <int kBlocks>
__device__ __forceinline__ void mask_columns(float (&s)[kBlocks][4], const SeenColumns& seen) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!seen.has(j, e)) s[j][e] = 0.0F;
    }
  }
}

// Rounds a tile to the element type, in the order of A fragments.
template <class Element, int kBlocks>
__device__ __forceinline__ void pack_block(const float (&s)[kBlocks][4], std::uint32_t (&a)[kBlocks / 2][4], int j) {
  a[j / 2][2 * (j % 2)] = cuda::MmaTraits<Element>::pack(s[j][0], s[j][1]);
  a[j / 2][2 * (j % 2) + 1] = cuda::MmaTraits<Element>::pack(s[j][2], s[j][3]);
}
// ptxas serialises wgmma where packing sinks below the fence of the GEMM that reads the fragments. Use before it.
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
