// SPDX-License-Identifier: Apache-2.0
// Parameters shared by the CUDA kernels of dQ and of dK and dV: the tables of a BackwardTask in device memory, and the
// addresses of sums. Both kernels use the same terms: a gradient has rows (dQ: queries, dK and dV: keys), and each row
// adds up tiles of the other side (dQ: keys, dK and dV: queries).
#pragma once

#include <cstdint>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention_backward/attention_backward.hpp"

namespace ringattn::cuda {

// Positions and finite sides of a mask are below this, so that differences fit into 32 bits.
inline constexpr std::int64_t kMaxBackwardPosition = std::int64_t{1} << 29;
// A side of the mask that has no limit.
inline constexpr std::int32_t kUnlimitedSide = 1 << 30;

// kBackwardTile rows of a gradient, at consecutive positions of one sequence. Tiles of the other side are numbered
// through the sequence. Fields besides `row` are 32 bits wide, as kernels keep them in registers.
struct RowTile {
  std::int64_t row;                           // of the rank's tensors, for the tile's row 0, which may not be valid
  std::int32_t offset;                        // position of row 0, counted from the other side's tile 0
  std::int32_t begin_tile, end_tile;          // the task's tiles that the rows add up are among these
  std::int32_t unmasked_begin, unmasked_end;  // tiles that every row sees in full
  std::int32_t valid_begin, valid_end;        // rows of the tile that the rank owns
  // Which sums of the rows exist before the task, and whether the last split stays open after it.
  std::int32_t flags;
  std::int32_t ds;  // dK and dV: dS of the rows and of tile begin_tile (DsSpill)

  static constexpr std::int32_t kHasOpenSum = 1;
  static constexpr std::int32_t kHasClosedSum = 2;
  static constexpr std::int32_t kStaysOpen = 4;
};
inline constexpr int kRowTilesOfPair = 2;
// Maximum number of launches for a task: dK and dV may have a kernel each.
inline constexpr int kBackwardCounters = 2;

// Head tiles of a sequence that a CTA computes together, for each KV head: one or two, or up to four in the GEMM that
// reads a DsSpill. A head tile is a RowTile and one of `group` query heads of the KV head (dK and dV: group = 1). Head
// tile n of the pair belongs to row tile `row_tile` + (head + n) / group and to head (head + n) % group.
struct RowTilePair {
  std::int32_t row_tile, head, count;
  std::int32_t begin_tile, end_tile;  // the union of the row tiles' ranges
  std::int32_t tiles;                 // that the task has in this range
  std::int32_t run_begin, run_end;    // BackwardTables::runs of the sequence
  std::int32_t other_end;             // where the other side's rows end, counted from its tile 0
  std::int32_t split_phase;           // tile t belongs to split (t + split_phase) / tiles_per_split
  // kNoPartial, or the number of the pair's partial sums. Such a pair has the tiles of one split only. Its sums are
  // stored separately, and merge_partials() adds them to those of the rows' other splits.
  std::int32_t partial;

  static constexpr std::int32_t kNoPartial = -1;
};

// A head tile whose splits were computed apart, as partial sums `partial`, …, partial + splits − 1 of its pair.
struct MergedHeadTile {
  std::int32_t row_tile, head;  // as in RowTilePair
  std::int32_t head_tile;       // of the pair
  std::int32_t partial, splits;
};

// Tiles [first_tile, first_tile + tiles) of a sequence, at entries table, table + 1, … of BackwardTables::tiles.
struct TileRun {
  std::int32_t first_tile, tiles, table;
};

// Where a tile's tensors are, for tiles that TMA can't load: K and V, or Q and dO.
struct TileRows {
  StridedRows<const void> rows[2];
};

// A tile of the other side.
struct OtherTile {
  const float* stats;  // row stats of its source; null for keys
  std::int64_t row;    // in its source, of the tile's row 0, which may not be present
  std::int32_t source;
  std::int32_t begin, end;  // rows of the sequence; the memory of the others belongs to something else
};

// dS that the dK/dV kernel stores in the input dtype, so that dQ = dS · K is one GEMM. A tile has kBackwardTile keys,
// kBackwardTile positions and one query head. Its 16-byte pieces are [kBackwardTile / 16 positions, 128 threads of the
// storing warpgroup], each the A fragment of its thread. A KV head's tiles follow each other: row tiles of keys
// ascending, in each the tiles of queries that see it, and in these the heads of the group.
struct DsSpill {
  char* tiles;                 // null: dS is not stored
  std::int32_t tiles_of_head;  // of a KV head
};
inline constexpr int kDsTileBytes = kBackwardTile * kBackwardTile * 2;

// Location of the dS of kBackwardTile keys. Tiles of queries are counted from position 0: tile t holds positions [t, t
// + 1) · kBackwardTile. For head `member` of the group, it is tile `first` + t · group + member of the KV head.
struct alignas(16) DsOfKeys {
  std::int32_t first;
  std::int32_t begin, end;  // tiles of queries that see the keys; all other pairs have no dS
  std::int32_t keys;        // of the sequence, from the tile's first one on
};
inline constexpr int kDsTilesOfKeyTile = 2;  // a key tile of the dQ kernel has twice kBackwardTile keys

struct BackwardTables {
  const RowTilePair* pairs;  // [pair_count], longest first
  const RowTile* row_tiles;
  const TileRun* runs;
  const OtherTile* tiles;
  const TileRows* tile_rows;     // [tiles]; null if TMA loads them
  const MergedHeadTile* merged;  // [merged_count]
  const DsOfKeys* ds;            // [tiles, kDsTilesOfKeyTile], for dQ from a DsSpill
  std::int32_t* taken;           // [kBackwardCounters] work counters of the task's launches; 0 at the start
  std::int32_t pair_count, merged_count;
  std::int32_t kv_heads;
  std::int32_t group;          // head tiles per row tile and KV head
  std::int32_t swizzle_heads;  // KV heads of an L2 swizzle group; divides kv_heads
  std::int32_t tiles_per_split;
  std::int32_t left, right;  // a row at offset x sees the other side's rows x − left … x + right
};

// Sums of a row and head are `width` floats, in an order that each kernel chooses. The state has a closed sum (of
// finished splits) and, if tasks may end within splits, an open sum (of the unfinished split) after it.
struct BackwardSums {
  float* state;              // [rows, heads, sums_of_row, width]; null: neither resumed nor saved
  std::int32_t sums_of_row;  // 1 or 2
  // Without a state: [CTAs, head tiles of a CTA, kBackwardTile, width] closed sums, then partial sums [partials,
  // kv_heads, head tiles of a CTA, kBackwardTile, width].
  float* scratch;
  bool save;
  bool finish;  // write gradients
};

struct BackwardGradient {
  StridedRows<void> rows;
  bool is_f32;
  bool in_pairs;  // pairs of elements are aligned
};

// Parameters that the kernels of dQ and of dK and dV share.
struct BackwardCommon {
  BackwardTables tables;
  BackwardSums sums;
  AttentionParams::Softmax softmax;
  float inverse_cap;  // 1 / softcap; 0 without one
  std::int32_t heads;
  DsSpill spill;                   // written with dK and dV, and read for dQ
  StridedRows<const void> own[2];  // q and dout, or k and v, of the rows
  bool bulk;                       // TMA loads all tensors, and there is no table of tile_rows; otherwise threads copy
};

}  // namespace ringattn::cuda
