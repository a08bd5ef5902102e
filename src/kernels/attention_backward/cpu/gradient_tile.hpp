// SPDX-License-Identifier: Apache-2.0
// Work tiles of the CPU backward kernels: rows of one sequence and KV head that process tiles of the other side
// together, so that a packed tile serves all of them. How rows are divided into them does not affect results.
//
// In memory, the state of each (row, head) has, one after the other,
//   flags           which of the two sums are present: kHasClosed, kHasOpen
//   sums[dims]      of the current split
//   sums[dims]      of the splits before it
// dims is head_dim for dQ, and head_dim + head_dim_v for dK and dV. Floats of an absent part are never read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/cpu/work_tile.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/attention_backward/cpu/backward_ops.hpp"
#include "kernels/common/cpu/thread_pool.hpp"

namespace ringattn::cpu {

inline constexpr int kHasClosed = 1;
inline constexpr int kHasOpen = 2;

// Keys in a tile of dQ's tasks.
inline constexpr int kDqKeyTile = kKeyTile;

// Rows of a work tile: they and a packed tile fit into the L2 cache.
inline constexpr int kDqTileRows = 144;   // queries × heads, unless one query has more heads
inline constexpr int kDkvTileRows = 120;  // keys

// The most queries of a work tile.
inline std::int64_t max_dq_rows(const AttentionSpec& spec) {
  const std::int64_t rows = std::int64_t{kDqTileRows} * spec.kv_heads / spec.heads;
  return rows < 1 ? 1 : rows;
}

inline std::size_t dq_state_floats(const AttentionSpec& spec) {
  return 1 + 2 * static_cast<std::size_t>(spec.head_dim);
}
inline std::size_t dkv_state_floats(const AttentionSpec& spec) {
  return 1 + 2 * static_cast<std::size_t>(spec.head_dim + spec.head_dim_v);
}

// One thread's scratch: views into one allocation. `stacked` rows are rows × heads of one KV head for dQ.
struct GradientScratch {
  float* x = nullptr;      // [stacked, head_dim]
  float* y = nullptr;      // [stacked, head_dim_v]
  float* lse2 = nullptr;   // [stacked], dQ
  float* delta = nullptr;  // [stacked], dQ
  // dx, dy: sums of the current split, 0 if there is none. closed_dx, closed_dy: sums of the splits before it, valid if
  // the row's flags have kHasClosed.
  float* dx = nullptr;         // [stacked, row_stride(head_dim)]
  float* dy = nullptr;         // [stacked, row_stride(head_dim_v)]; null for dQ
  float* closed_dx = nullptr;  // as dx
  float* closed_dy = nullptr;  // as dy
  int* flags = nullptr;        // [stacked]
  float* scores = nullptr;     // [row_block, kKeyTile]
  float* dp = nullptr;         // [row_block, kKeyTile]
  BackwardTile tile;
  ColumnRange* visible = nullptr;  // [stacked]
  std::int64_t* row = nullptr;     // [rows]: row of the task
  KeyRange* columns = nullptr;     // [rows]: keys that the query sees, or positions that see the key
  TileRange* tiles = nullptr;      // [rows]: tiles of `columns`

  // Lay out the arrays from `base`, which is aligned to kVectorAlignment, and return the bytes. A null base only
  // counts.
  static std::size_t layout_dq(const AttentionSpec& spec, const BackwardOps& ops, std::byte* base,
                               GradientScratch& scratch);
  static std::size_t layout_dkv(const AttentionSpec& spec, const BackwardOps& ops, std::byte* base,
                                GradientScratch& scratch);
};

// Run a task for one work tile and KV head: load the rows' state, add every tile of the task that a row sees, and save
// or finish. They return early, with nothing written, if the checkpoint says so.
void add_dq_tile(const AttentionBackwardSpec& spec, const BackwardOps& ops, const DqTask& task,
                 const WorkTile& work_tile, int kv_head, GradientScratch& scratch, const Checkpoint& checkpoint);
void add_dkv_tile(const AttentionBackwardSpec& spec, const BackwardOps& ops, const DkvTask& task,
                  const WorkTile& work_tile, int kv_head, GradientScratch& scratch, const Checkpoint& checkpoint);

}  // namespace ringattn::cpu
