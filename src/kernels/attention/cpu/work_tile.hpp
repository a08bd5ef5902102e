// SPDX-License-Identifier: Apache-2.0
// A work tile: rows of one sequence that process key tiles together, so that a packed key tile serves all of them, with
// all query heads of one KV head, or with one query head if each has its own block mask. Work tiles are independent.
// How rows are divided into them does not affect results.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/common/cpu/thread_pool.hpp"
#include "kernels/common/cpu/tile_ops.hpp"

namespace ringattn::cpu {

// `rows` consecutive rows of a task, from row `offset` of queries[run] on, continuing in the following runs of the
// sequence.
struct WorkTile {
  std::int64_t run = 0;
  std::int64_t offset = 0;
  std::int64_t rows = 0;
};

// Maximum number of rows in a work tile: within the limits of `ops`, unless one token has more heads.
inline std::int64_t max_tile_rows(const AttentionSpec& spec, const TileOps& ops) {
  const auto row_floats = static_cast<std::size_t>(ops.q_stride(spec.head_dim) + ops.o_stride(spec.head_dim_v));
  const auto stacked =
      static_cast<std::int64_t>(std::min(ops.work_tile_rows, ops.work_tile_bytes / (row_floats * sizeof(float))));
  return std::max<std::int64_t>(1, stacked * spec.kv_heads / spec.heads);
}

// Divides a task's rows into work tiles of at most `rows` rows. None spans two sequences or, with a block mask, two
// query blocks.
std::vector<WorkTile> make_work_tiles(std::span<const QueryRun> queries, std::int64_t rows,
                                      const BlockMaskShape& block_mask);

// Calls visit(first, count, run, offset) for each query run of a work tile: its rows [offset, offset + count) are the
// work tile's rows first, first + 1, ….
template <typename Visit>
void for_each_query_run(std::span<const QueryRun> queries, const WorkTile& work_tile, Visit visit) {
  std::int64_t done = 0;
  std::int64_t offset = work_tile.offset;
  for (auto run = static_cast<std::size_t>(work_tile.run); done < work_tile.rows; ++run, offset = 0) {
    const std::int64_t count = std::min(work_tile.rows - done, queries[run].rows - offset);
    visit(done, count, queries[run], offset);
    done += count;
  }
}

// Query heads of a head work tile.
inline int heads_of_tile(const AttentionSpec& spec) {
  return spec.block_mask.heads > spec.kv_heads ? 1 : spec.heads / spec.kv_heads;
}

// Key tiles of a task that are packed once for all work tiles. Packing reads rows that lie a page apart, which takes
// several times as long as attending 20 rows, and each work tile would repeat it.
class SharedTiles {
 public:
  SharedTiles() = default;
  // Slots for tiles [0, tiles) of AttentionTask::tiles and `heads` KV heads from `first_head` on, in `memory`.
  SharedTiles(const AttentionSpec& spec, const TileOps& ops, std::byte* memory, std::int64_t tiles, int first_head,
              int heads)
      : spec_(&spec), ops_(&ops), memory_(memory), tiles_(tiles), first_head_(first_head), heads_(heads) {}

  static std::size_t slot_bytes(const AttentionSpec& spec, const TileOps& ops) {
    return (ops.k_floats(spec.head_dim) + ops.packed_v_floats(spec.head_dim_v)) * sizeof(float) + kVectorAlignment;
  }

  int heads() const { return heads_; }
  std::int64_t slots() const { return tiles_ * heads_; }
  // Packs one of slots(). Consecutive items are heads of one tile, whose rows share pages.
  void pack(const AttentionTask& task, std::int64_t item) const;
  // Whether the tile with index `table` of the task has been packed for `head`; then `tile` is a view of it.
  bool find(int head, std::int64_t table, PackedTile& tile) const;

 private:
  PackedTile view(std::int64_t slot) const {
    auto* const k = reinterpret_cast<float*>(memory_ + static_cast<std::size_t>(slot) * slot_bytes(*spec_, *ops_));
    return {k, k + ops_->k_floats(spec_->head_dim)};
  }
  // Whether a slot's values are finite: otherwise attend() may write to the tile, and each work tile packs its own.
  int* finite(std::int64_t slot) const {
    const PackedTile tile = view(slot);
    return reinterpret_cast<int*>(tile.v + ops_->packed_v_floats(spec_->head_dim_v));
  }

  const AttentionSpec* spec_ = nullptr;
  const TileOps* ops_ = nullptr;
  std::byte* memory_ = nullptr;
  std::int64_t tiles_ = 0;
  int first_head_ = 0;
  int heads_ = 0;
};

// One thread's scratch: views into one allocation.
struct TileScratch {
  float* q = nullptr;       // [max rows × heads per kv head, q_stride]
  float* scores = nullptr;  // [score_floats]
  // Partial of the current KV split; the identity if there is none.
  float* acc = nullptr;     // [max rows × heads per kv head, o_stride]
  float* offset = nullptr;  // [max rows × heads per kv head]
  float* sum = nullptr;     // [max rows × heads per kv head]
  // The merged splits before it, if kHasMerged.
  float* merged_acc = nullptr;     // [max rows × heads per kv head, o_stride]
  float* merged_offset = nullptr;  // [max rows × heads per kv head]
  float* merged_sum = nullptr;     // [max rows × heads per kv head]
  int* flags = nullptr;            // [max rows × heads per kv head]: AttentionState::flags
  PackedTile tile;
  ColumnRange* visible = nullptr;  // [max rows × heads per kv head]
  std::int64_t* row = nullptr;     // [max rows]: row of the task
  KeyRange* keys = nullptr;        // [max rows]: keys that the row sees
  TileRange* key_tiles = nullptr;  // [max rows]: key tiles that the row processes

  // Lays out the arrays from `base`, which is aligned to kVectorAlignment, and returns the bytes. A null base only
  // counts.
  static std::size_t layout(const AttentionSpec& spec, const TileOps& ops, std::byte* base, TileScratch& scratch);
};

// Runs a task for one work tile and heads_of_tile() query heads from `head` on: loads the rows' state, attends to every
// key tile of the task that a row sees, and saves or finishes. Returns early, with nothing written, if the checkpoint
// says so.
void attend_work_tile(const AttentionSpec& spec, const TileOps& ops, const AttentionTask& task,
                      const WorkTile& work_tile, int head, const SharedTiles& shared, TileScratch& scratch,
                      const Checkpoint& checkpoint);

}  // namespace ringattn::cpu
