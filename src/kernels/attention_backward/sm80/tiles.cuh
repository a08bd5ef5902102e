// SPDX-License-Identifier: Apache-2.0
// Code shared by the dQ kernel and the dK/dV kernel: the loop over tiles, and GEMMs by mma.sync.
#pragma once

#include <cstdint>

#include "kernels/attention/cuda/scaled_score.cuh"
#include "kernels/attention_backward/cuda/sums.cuh"
#include "kernels/attention_backward/sm80/backward_params.hpp"
#include "kernels/attention_backward/sm80/config.hpp"
#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::sm80 {

using cuda::RowTile;
using cuda::RowTilePair;
using cuda::SeenColumns;
using cuda::SumEnd;
using cuda::SumRows;
using cuda::TileRun;

__device__ __forceinline__ int lane_of_warp() { return cuda::thread_of_cta() % 32; }

// Row `row` and the following ones of a head.
__device__ __forceinline__ cuda::RowsOf rows_at(const cuda::StridedRows<const void>& rows, std::int64_t row, int head) {
  constexpr std::int64_t kElementBytes = 2;
  return {static_cast<const char*>(rows.data) + (row * rows.token_stride + head * rows.head_stride) * kElementBytes,
          rows.token_stride * kElementBytes};
}

// Contents of a pipeline stage: rows of one head, a part of a tile of the other side.
struct StageRows {
  cuda::RowsOf rows[2];       // of row 0: K and V, or Q and dO
  const float* stats;         // of row 0; null for keys
  std::int32_t begin, end;    // the rows that the sequence has; the others become zeros
  std::int32_t part;          // tile · kParts + part
  std::int32_t begins_split;  // whether it is the first stage of a split
};

// The loop of a CTA over its stages, in shared memory. It visits tiles in ascending order, the heads of a group within
// a tile, and the parts of kRows rows within a head. One thread looks up the rows of a stage, one step before all
// threads load it, so that the others need no registers for it.
template <int kRows>
struct StageLoop {
  static constexpr int kParts = kBackwardTile / kRows;
  static constexpr int kSlots = 4;  // a power of two: the stages that are computed, loaded and looked up

  StageRows slots[kSlots];
  std::int32_t steps;  // of the work
  std::int32_t found;  // stages that have been looked up
  std::int32_t part, member, group, head;
  std::int32_t run, tile, run_tiles_end, index;  // `index` is the tile's in BackwardTables::tiles

  __device__ __forceinline__ const StageRows& at(int step) const { return slots[step % kSlots]; }

  // Called by one thread. `heads`: the other side's heads per KV head.
  __device__ __forceinline__ void begin(const cuda::BackwardTables& tables, const RowTilePair& pair, int kv_head,
                                        int heads, std::int64_t stats_stride) {
    steps = pair.tiles * heads * kParts;
    found = 0;
    part = 0;
    member = 0;
    group = heads;
    head = kv_head * heads;
    run = pair.run_begin;
    if (steps == 0) return;
    enter_run(tables, pair);
    look_up(tables, pair, stats_stride);
    look_up(tables, pair, stats_stride);
  }

  // Looks up the next stage, if there is one. Called by one thread. `stats_stride`: floats of a row's stats.
  __device__ __forceinline__ void look_up(const cuda::BackwardTables& tables, const RowTilePair& pair,
                                          std::int64_t stats_stride) {
    if (found == steps) return;
    const int first = part * kRows;
    const cuda::OtherTile& from = tables.tiles[index];
    const cuda::TileRows& tensors = tables.tile_rows[index];
    const std::int64_t row = from.row + first;
    const int left = from.end - first;
    StageRows& to = slots[found % kSlots];
    to.rows[0] = rows_at(tensors.rows[0], row, head + member);
    to.rows[1] = rows_at(tensors.rows[1], row, head + member);
    to.stats = from.stats == nullptr ? nullptr : from.stats + row * stats_stride + (head + member) * kRowStats;
    to.begin = from.begin > first ? from.begin - first : 0;
    to.end = left < kRows ? left : kRows;
    to.part = tile * kParts + part;
    to.begins_split = part == 0 && member == 0 && (tile + pair.split_phase) % tables.tiles_per_split == 0 ? 1 : 0;
    ++found;
    if (++part < kParts) return;
    part = 0;
    if (++member < group) return;
    member = 0;
    if (found == steps) return;
    ++tile;
    ++index;
    if (tile == run_tiles_end) {
      ++run;
      enter_run(tables, pair);
    }
    prefetch(tables.tiles + index);
    prefetch(tables.tile_rows + index);
  }

 private:
  // An entry may lie in two cache lines.
  template <class Entry>
  __device__ __forceinline__ static void prefetch(const Entry* entry) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(entry));
    asm volatile("prefetch.global.L1 [%0];" ::"l"(reinterpret_cast<const char*>(entry + 1) - 1));
  }
  __device__ __forceinline__ void enter_run(const cuda::BackwardTables& tables, const RowTilePair& pair) {
    for (;; ++run) {
      const TileRun next = tables.runs[run];
      const cuda::TileInterval range = cuda::common_tiles(next, pair.begin_tile, pair.end_tile);
      if (range.begin >= range.end) continue;
      tile = range.begin;
      run_tiles_end = range.end;
      index = next.table + range.begin - next.first_tile;
      return;
    }
  }
};

// Takes the CTA's next work. Every thread calls it after its last access to the previous work. An absent head tile gets
// no tiles. `heads`: as in StageLoop::begin().
template <int kHeadTiles, int kRows>
__device__ __forceinline__ void take_work(const cuda::BackwardCommon& common, int heads,
                                          cuda::BackwardWork<kHeadTiles>& work, StageLoop<kRows>& loop) {
  __syncthreads();
  if (cuda::thread_of_cta() < 32) {
    int taken = 0;
    if (cuda::thread_of_cta() == 0) taken = atomicAdd(common.tables.taken, 1);
    const bool any = cuda::publish_work(common.tables, __shfl_sync(0xffffffffU, taken, 0), work);
    if (any && cuda::thread_of_cta() == 0) {
      for (int i = work.pair.count; i < kHeadTiles; ++i) work.row_tiles[i].end_tile = work.row_tiles[i].begin_tile;
      loop.begin(common.tables, work.pair, work.kv_head, heads, common.heads * kRowStats);
    }
  }
  __syncthreads();
}

// ldmatrix addresses of a thread in a tile: of an A operand with rows from `row` on, of a B operand whose rows are the
// columns of the product, and of one whose rows are summed over.
__device__ __forceinline__ std::uint32_t a_operand(std::uint32_t tile, int row) {
  return tile + cuda::swizzled(row + lane_of_warp() % 16, lane_of_warp() / 16);
}
__device__ __forceinline__ std::uint32_t b_operand(std::uint32_t tile) {
  return tile + cuda::swizzled(lane_of_warp() % 8 + lane_of_warp() / 16 * 8, lane_of_warp() / 8 % 2);
}
__device__ __forceinline__ std::uint32_t b_operand_transposed(std::uint32_t tile) {
  return tile + cuda::swizzled(lane_of_warp() % 16, lane_of_warp() / 16);
}

// The A operands of kDim columns of a tile.
template <int kDim, int kRows, int kRowBlocks>
__device__ __forceinline__ void load_operands(std::uint32_t (&a)[kDim / 16][kRowBlocks][4], std::uint32_t a_at) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      cuda::load_matrix(a[step][block], cuda::at_columns<kRows>(a_at, step) +
                                            static_cast<std::uint32_t>(block * 16 * cuda::kPanelRowBytes));
    }
  }
}

// 16 columns of s = A · Bᵀ, of a tile of kRowsB rows.
template <class Element, int kRowsB, int kRowBlocks>
__device__ __forceinline__ void multiply_step(float (&s)[kRowBlocks][kRowsB / 8][4],
                                              const std::uint32_t (&a)[kRowBlocks][4], std::uint32_t b_at, int step) {
#pragma unroll
  for (int n = 0; n < kRowsB / 16; ++n) {
    std::uint32_t b[4];
    cuda::load_matrix(b,
                      cuda::at_columns<kRowsB>(b_at, step) + static_cast<std::uint32_t>(n * 16 * cuda::kPanelRowBytes));
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      cuda::multiply<Element>(s[block][2 * n], a[block], b[0], b[1], step == 0);
      cuda::multiply<Element>(s[block][2 * n + 1], a[block], b[2], b[3], step == 0);
    }
  }
}

// s = A · Bᵀ, of A in registers and kDim columns of a tile of kRowsB rows.
template <class Element, int kDim, int kRowsB, int kRowBlocks>
__device__ __forceinline__ void multiply_transposed(float (&s)[kRowBlocks][kRowsB / 8][4],
                                                    const std::uint32_t (&a)[kDim / 16][kRowBlocks][4],
                                                    std::uint32_t b_at) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) multiply_step<Element, kRowsB>(s, a[step], b_at, step);
}

// s = A · Bᵀ, of kDim columns of a tile of kRowsA rows and one of kRowsB rows.
template <class Element, int kDim, int kRowsA, int kRowsB, int kRowBlocks>
__device__ __forceinline__ void multiply_transposed(float (&s)[kRowBlocks][kRowsB / 8][4], std::uint32_t a_at,
                                                    std::uint32_t b_at) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    std::uint32_t a[kRowBlocks][4];
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      cuda::load_matrix(a[block], cuda::at_columns<kRowsA>(a_at, step) +
                                      static_cast<std::uint32_t>(block * 16 * cuda::kPanelRowBytes));
    }
    multiply_step<Element, kRowsB>(s, a, b_at, step);
  }
}

// d += A · B, of A in registers and kDim columns of a tile of kRowsB rows, which are added in ascending order.
template <class Element, int kDim, int kRowsB, int kRowBlocks>
__device__ __forceinline__ void multiply_add(float (&d)[kRowBlocks][kDim / 8][4],
                                             const std::uint32_t (&a)[kRowBlocks][kRowsB / 16][4], std::uint32_t b_at) {
#pragma unroll
  for (int step = 0; step < kRowsB / 16; ++step) {
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      std::uint32_t b[4];
      cuda::load_matrix_transposed(
          b, cuda::at_columns<kRowsB>(b_at, n) + static_cast<std::uint32_t>(step * 16 * cuda::kPanelRowBytes));
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        cuda::multiply<Element>(d[block][2 * n], a[block][step], b[0], b[1], false);
        cuda::multiply<Element>(d[block][2 * n + 1], a[block][step], b[2], b[3], false);
      }
    }
  }
}

// Location and rows of a warp's sum of one gradient: blocks of 16 rows of a row tile, from `row` on. `heads` and `head`
// are those of the state; see sum_rows(). It is constructed only when it is used, so that it takes no registers in the
// main loop.
struct SumPlace {
  const RowTile& tile;
  int row, scratch_tile, heads, head, width, part;

  __device__ __forceinline__ int row_of_thread(int block) const { return row + block * 16 + lane_of_warp() / 4; }
  __device__ __forceinline__ SumRows rows(const cuda::BackwardSums& sums, int block, bool open) const {
    return cuda::sum_rows(sums, tile, scratch_tile, row_of_thread(block), heads, head, width, part, open);
  }
};

// A warp's sum of one gradient, of kColumns columns. Counts splits while tiles are added.
template <class Element, int kRowBlocks, int kColumns>
class GradientSum {
 public:
  __device__ __forceinline__ explicit GradientSum(const cuda::BackwardSums& sums) : sums_(sums) {}

  // Called before the task's first tile.
  __device__ __forceinline__ void begin(const SumPlace& place) {
    flags_ = place.tile.flags;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      cuda::load_sum_in_pairs(place.rows(sums_, block, true), any_open(), d[block]);
    }
  }
  // Called before a stage is added. `place` returns the sum's SumPlace.
  template <class Place>
  __device__ __forceinline__ void enter(const Place& place, const StageRows& stage) {
    if (stage.begins_split != 0 && any_open()) close(place());
    flags_ |= RowTile::kHasOpenSum;
  }
  // After the task's tiles: saves the sum, or finishes it.
  __device__ __forceinline__ void end(const SumPlace& place, const cuda::BackwardGradient& gradient, int head,
                                      float factor) const {
    const SumEnd how{any_open(), any_closed(), (flags_ & RowTile::kStaysOpen) != 0, sums_.save};
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      if (how.any_open && how.stays_open && how.save)
        cuda::add_sum_in_pairs(place.rows(sums_, block, true), d[block], true);
      if (sums_.finish) {
        cuda::finish_sum<Element>(place.rows(sums_, block, false), how, gradient, place.tile,
                                  place.row_of_thread(block), head, d[block], factor);
      } else if (how.any_open && !how.stays_open) {
        cuda::add_sum_in_pairs(place.rows(sums_, block, false), d[block], !how.any_closed);
      }
    }
  }

  float d[kRowBlocks][kColumns / 8][4];

 private:
  __device__ __forceinline__ bool any_open() const { return (flags_ & RowTile::kHasOpenSum) != 0; }
  __device__ __forceinline__ bool any_closed() const { return (flags_ & RowTile::kHasClosedSum) != 0; }
  // Adds the split to the closed sum, and begins the next one.
  __device__ __forceinline__ void close(const SumPlace& place) {
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      cuda::add_sum_in_pairs(place.rows(sums_, block, false), d[block], !any_closed());
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) d[block][j][e] = 0.0F;
      }
    }
    flags_ |= RowTile::kHasClosedSum;
  }

  const cuda::BackwardSums& sums_;
  int flags_ = 0;  // RowTile::flags, of the sums so far
};

}  // namespace ringattn::sm80
