// SPDX-License-Identifier: Apache-2.0
// The work of a CTA of a backward kernel, the tiles that it has in common with a run of tiles, masks, and operands.
#pragma once

#include <cstdint>

#include "kernels/attention_backward/cuda/backward_params.hpp"
#include "kernels/common/cuda/ptx.cuh"

namespace ringattn::cuda {

inline constexpr int kNoWorkLeft = -1;

// A pair of head tiles, or one, of a KV head, in shared memory.
template <int kHeadTiles>
struct BackwardWork {
  RowTilePair pair;
  RowTile row_tiles[kHeadTiles];
  std::int32_t kv_head;  // or kNoWorkLeft
};

template <class Table>
__device__ __forceinline__ void copy_words(Table& target, const Table& source) {
  auto* to = reinterpret_cast<std::uint32_t*>(&target);
  const auto* from = reinterpret_cast<const std::uint32_t*>(&source);
  constexpr int kWords = sizeof(Table) / sizeof(std::uint32_t);
  constexpr int kLanes = 32;
  static_assert(kWords <= kLanes && sizeof(Table) % sizeof(std::uint32_t) == 0);
  const int lane = thread_of_cta() % kLanes;
  if (lane < kWords) to[lane] = from[lane];
}

// Called by one warp. False: there is no work with this number.
template <int kHeadTiles>
__device__ __forceinline__ bool publish_work(const BackwardTables& tables, int index, BackwardWork<kHeadTiles>& work) {
  const bool any = index < tables.pair_count * tables.kv_heads;
  int kv_head = kNoWorkLeft;
  if (any) {
    const WorkIndex at = work_index(tables.pair_count, tables.kv_heads, tables.swizzle_heads, index);
    const RowTilePair& pair = tables.pairs[at.entry];
    copy_words(work.pair, pair);
#pragma unroll
    for (int head_tile = 0; head_tile < kHeadTiles; ++head_tile) {
      const int next = (pair.head + head_tile) / tables.group;
      copy_words(work.row_tiles[head_tile], tables.row_tiles[pair.row_tile + (head_tile < pair.count ? next : 0)]);
    }
    kv_head = at.head;
  }
  if (thread_of_cta() % 32 == 0) work.kv_head = kv_head;
  __syncwarp();
  return any;
}

// The query head of a head tile.
template <int kHeadTiles>
__device__ __forceinline__ int head_of(const BackwardTables& tables, const BackwardWork<kHeadTiles>& work,
                                       int head_tile) {
  return work.kv_head * tables.group + (work.pair.head + head_tile) % tables.group;
}

// Tiles [begin, end) that a run of tiles has in common with a range.
struct TileInterval {
  int begin, end;
};
__device__ __forceinline__ TileInterval common_tiles(const TileRun& run, int begin, int end) {
  return {run.first_tile > begin ? run.first_tile : begin,
          run.first_tile + run.tiles < end ? run.first_tile + run.tiles : end};
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
  // Counted from a later column of the tile.
  __device__ __forceinline__ SeenColumns from(int column) const {
    return {low - column, {high[0] - column, high[1] - column}};
  }
};
__device__ __forceinline__ int first_column_of_thread() { return thread_of_cta() % 4 * 2; }
// The first row is at `offset`, and the tile's column 0 at `column`. Columns from `end` on belong to other sequences.
__device__ __forceinline__ SeenColumns seen_columns(const BackwardTables& tables, int offset, int column, int end) {
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

// Rounds block j of a tile to the element type, in the order of A fragments.
template <class Element, int kSteps>
__device__ __forceinline__ void pack_block(const float (&block)[4], std::uint32_t (&a)[kSteps][4], int j) {
  a[j / 2][2 * (j % 2)] = MmaTraits<Element>::pack(block[0], block[1]);
  a[j / 2][2 * (j % 2) + 1] = MmaTraits<Element>::pack(block[2], block[3]);
}

}  // namespace ringattn::cuda
