// SPDX-License-Identifier: Apache-2.0
// A row group: rows of one sequence that walk over the key tiles together, so that a packed tile serves them all, with
// all query heads of one kv head, or with one of them where each has a list of tiles of its own. Groups are
// independent; how rows are grouped moves no bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu/team.hpp"
#include "kernels/cpu/tile_ops.hpp"
#include "kernels/fold.hpp"

namespace ringattn::cpu {

// Query rows × heads of a group, unless one token alone has more heads. Packing a tile costs about as much as folding
// it into 10 of them.
inline constexpr int kGroupRows = 240;

// `rows` consecutive rows of a task, from row `offset` of queries[run] on, through the following runs of the sequence.
struct RowGroup {
  std::int64_t run = 0;
  std::int64_t offset = 0;
  std::int64_t rows = 0;
};

// Largest number of rows in a group.
inline std::int64_t max_group_rows(const FoldSpec& spec) {
  const std::int64_t rows = std::int64_t{kGroupRows} * spec.kv_heads / spec.heads;
  return rows < 1 ? 1 : rows;
}

// Cuts a task's rows into groups of at most `rows` rows, none across two sequences or, where `lists` are given, across
// two query blocks.
std::vector<RowGroup> make_row_groups(std::span<const QueryRun> queries, std::int64_t rows, const ListShape& lists);

// Query heads that a group is folded for at a time.
inline int heads_of_group(const FoldSpec& spec) {
  return spec.lists.heads > spec.kv_heads ? 1 : spec.heads / spec.kv_heads;
}

// One thread's scratch: views into one allocation.
struct GroupScratch {
  float* q = nullptr;       // [max rows × heads per kv head, head_dim]
  float* scores = nullptr;  // [row_block, kKeyTile]
  // Of the open group of key tiles; where there is none, the identity.
  float* o = nullptr;  // [max rows × heads per kv head, o_stride]
  float* m = nullptr;  // [max rows × heads per kv head]
  float* l = nullptr;  // [max rows × heads per kv head]
  // Of the groups before it, where there are any.
  float* closed_o = nullptr;  // [max rows × heads per kv head, o_stride]
  float* closed_m = nullptr;  // [max rows × heads per kv head]
  float* closed_l = nullptr;  // [max rows × heads per kv head]
  int* parts = nullptr;       // [max rows × heads per kv head]: RowState::parts
  PackedTile tile;
  ColumnRange* visible = nullptr;  // [max rows × heads per kv head]
  std::int64_t* row = nullptr;     // [max rows]: of the task
  KeyRange* keys = nullptr;        // [max rows]: that the row sees
  TileRange* key_tiles = nullptr;  // [max rows]: that the row folds

  // Lays the arrays out from `base`, which is aligned to kVectorAlignment, and counts the bytes. A null base only
  // counts.
  static std::size_t layout(const FoldSpec& spec, const TileOps& ops, std::byte* base, GroupScratch& scratch);
};

// Does a task for one group and heads_of_group() query heads from `head` on: takes the rows' state, folds every tile of
// the task that a row sees, saves, finishes. Returns early, with nothing written, when the checkpoint says so.
void fold_row_group(const FoldSpec& spec, const TileOps& ops, const FoldTask& task, const RowGroup& group, int head,
                    GroupScratch& scratch, const Checkpoint& checkpoint);

}  // namespace ringattn::cpu
