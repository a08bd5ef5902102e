// SPDX-License-Identifier: Apache-2.0
// A row group: rows of one sequence that walk over the key tiles together, so that a packed tile serves them all, with
// all query heads of one kv head, or with one of them where each has a list of tiles of its own. Groups are
// independent; how rows are grouped moves no bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/cpu/thread_pool.hpp"
#include "kernels/cpu/tile_ops.hpp"

namespace ringattn::cpu {

// Query rows × heads of a group, unless one token alone has more heads. Packing a tile costs about as much as folding
// it into 10 of them.
inline constexpr int kWorkTileRows = 240;

// `rows` consecutive rows of a task, from row `offset` of queries[run] on, through the following runs of the sequence.
struct WorkTile {
  std::int64_t run = 0;
  std::int64_t offset = 0;
  std::int64_t rows = 0;
};

// Largest number of rows in a group.
inline std::int64_t max_tile_rows(const AttentionSpec& spec) {
  const std::int64_t rows = std::int64_t{kWorkTileRows} * spec.kv_heads / spec.heads;
  return rows < 1 ? 1 : rows;
}

// Cuts a task's rows into groups of at most `rows` rows, none across two sequences or, where `lists` are given, across
// two query blocks.
std::vector<WorkTile> make_work_tiles(std::span<const QueryRun> queries, std::int64_t rows,
                                      const BlockMaskShape& block_mask);

// Query heads that a group is folded for at a time.
inline int heads_of_tile(const AttentionSpec& spec) {
  return spec.block_mask.heads > spec.kv_heads ? 1 : spec.heads / spec.kv_heads;
}

// One thread's scratch: views into one allocation.
struct TileScratch {
  float* q = nullptr;       // [max rows × heads per kv head, head_dim]
  float* scores = nullptr;  // [row_block, kKeyTile]
  // Of the open group of key tiles; where there is none, the identity.
  float* acc = nullptr;     // [max rows × heads per kv head, o_stride]
  float* offset = nullptr;  // [max rows × heads per kv head]
  float* sum = nullptr;     // [max rows × heads per kv head]
  // Of the groups before it, where there are any.
  float* merged_acc = nullptr;     // [max rows × heads per kv head, o_stride]
  float* merged_offset = nullptr;  // [max rows × heads per kv head]
  float* merged_sum = nullptr;     // [max rows × heads per kv head]
  int* flags = nullptr;            // [max rows × heads per kv head]: AttentionState::flags
  PackedTile tile;
  ColumnRange* visible = nullptr;  // [max rows × heads per kv head]
  std::int64_t* row = nullptr;     // [max rows]: of the task
  KeyRange* keys = nullptr;        // [max rows]: that the row sees
  TileRange* key_tiles = nullptr;  // [max rows]: that the row folds

  // Lays the arrays out from `base`, which is aligned to kVectorAlignment, and counts the bytes. A null base only
  // counts.
  static std::size_t layout(const AttentionSpec& spec, const TileOps& ops, std::byte* base, TileScratch& scratch);
};

// Does a task for one group and heads_of_tile() query heads from `head` on: takes the rows' state, folds every tile of
// the task that a row sees, saves, finishes. Returns early, with nothing written, when the checkpoint says so.
void attend_work_tile(const AttentionSpec& spec, const TileOps& ops, const AttentionTask& task, const WorkTile& group,
                      int head, TileScratch& scratch, const Checkpoint& checkpoint);

}  // namespace ringattn::cpu
