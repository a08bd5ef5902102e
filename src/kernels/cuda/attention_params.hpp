// SPDX-License-Identifier: Apache-2.0
// What a CUDA fold kernel is given: the tables of a AttentionTask as they lie in device memory, and the numbers of the
// job. Plain data without vendor types: the host fills it, and kernels read it. The words are explained in
// kernels/README.md.
#pragma once

#include <cstdint>

#include "kernels/visibility.hpp"

namespace ringattn::cuda {

// kernels/attention.hpp's PageRun, KeySource and KeyRun for the device. Strides count elements.
struct TileEntry {
  std::int32_t source;
  std::int64_t row;
};
inline constexpr std::int64_t kNoPages = 62;  // as page_log: the source is one page
struct SourceEntry {
  const void* k;  // [rows, kv_heads, head_dim]
  const void* v;  // [rows, kv_heads, head_dim_v]
  std::int64_t rows;
  std::int64_t k_token_stride, k_head_stride;
  std::int64_t v_token_stride, v_head_stride;
  // Row r is row r % 2^page_log of page r / 2^page_log.
  std::int64_t k_page_stride, v_page_stride;
  std::int64_t page_log;

  bool has_pages() const { return page_log != kNoPages; }
};
// The tiles of a sequence that a task has are numbered 0, 1, … through all of its runs; where there are lists of tiles,
// each list has runs of its own, and those of its tiles that the task has are numbered. A run's first tile has number
// `first`; it is tile `first_tile` of the sequence, and entry `table` of the map of tiles.
struct RunEntry {
  std::int64_t first_tile;
  std::int64_t first;
  std::int64_t table;
};

// Query rows of one run, which fold the same tiles, or nearly so where there are no query tiles. Slots
// [valid_row_begin, valid_row_end) hold rows; the memory of the others belongs to somebody else. An work_tile counts
// for the Schedule's entry_heads heads from `head` on: for every head, unless heads have lists of tiles, or of
// positions, of their own.
struct WorkTile {
  std::int64_t row;         // where slot 0's row would be in q
  std::int64_t position;    // of slot 0
  std::int64_t key_length;  // of the sequence
  // The first tile that the work_tile folds: its number, counted through the sequence's runs; its number in the
  // sequence; its entry in the map of tiles. Where the work_tile's tiles lie in one run, the others follow it in all
  // three.
  std::int64_t first, first_tile, table;
  std::int32_t tiles;
  std::int32_t run_begin, runs;  // the entries in AttentionParams::Tables::runs that hold the tiles
  std::int32_t valid_row_begin, valid_row_end;
  std::int32_t split_position;  // of the first tile: the tile at position n belongs to group n / kTilesPerKvSplit
                                // (kernels/block_mask.hpp)
  std::int32_t head;            // the first query head
  // Of an work_tile with several runs, or whose keys have positions of their own: its tiles [plain_begin, plain_end)
  // are seen whole by every row.
  std::int32_t plain_begin, plain_end;
  std::int32_t position_list;  // of AttentionParams::Tables::positions, which of a tile's lists
};

// Units of one sequence, and of one list where there are block_mask, that are folded side by side. Of the Schedule's
// `heads_per_gqa_tile` query heads that share a KV head, unit n is the one of work_tile `work_tile` + (head + n) /
// heads_per_gqa_tile and of number (head + n) % heads_per_gqa_tile. The work_tiles say which head is the first.
struct GqaPackedTile {
  std::int64_t first, first_tile, table;  // of the walk's first tile, as in WorkTile
  std::int32_t tiles;
  std::int32_t run_begin, runs;
  std::int32_t work_tile, head, head_tiles;
};

// Sources that stand in the launch's parameters themselves.
inline constexpr int kNearSources = 4;

// Rows of a tensor for each of its heads; a row's elements lie side by side. Strides count elements.
template <class Data>
struct StridedRows {
  Data* data;
  std::int64_t token_stride, head_stride;
};

// What a launch is given, in parts by who reads them.
struct AttentionParams {
  // What is folded next and where its keys lie: read where a CTA, or its scheduler, takes work and looks up tiles.
  struct Tables {
    const WorkTile* work_tiles;      // [work_tile_count]
    const GqaPackedTile* gqa_tiles;  // [gqa_tile_count], for every KV head; of kernels that work in gqa_tiles
    const RunEntry* runs;
    const TileEntry* tiles;
    // [tiles of the map, position_lists, key_tile]: where each key stands, kNoPosition behind a sequence's last one
    // (kernels/key_positions.hpp). Null: key i of a sequence stands at position i.
    const std::int32_t* positions;
    std::int32_t position_lists;             // 1 for all K/V heads, or one each
    SourceEntry near_sources[kNearSources];  // the first ones; they arrive with the launch, so nobody waits for them
    const SourceEntry* sources;              // all of them, where there are more
    bool all_near;                           // there are not
    std::int32_t page_runs;                  // entries of `tiles` for a tile: the page_runs that it lies in
    std::int32_t work_tile_count, gqa_tile_count;
  };

  // In which order, and by whom: read by the launch, the scheduler (work_order.hpp) and the pace warp.
  struct Schedule {
    std::int32_t* taken;           // counter of work that CTAs have taken, 0 at the start and when the kernel ends
    std::int32_t* tiles_done;      // [multiprocessors]: tiles that CTAs which keep pace have begun; 0 before the first
                                   // task, then what the task before has left
    std::int32_t multiprocessors;  // of the device
    std::int32_t cluster_ctas;     // CTAs that fold a gqa_tile side by side, each its part of the units
    std::int32_t
        entry_heads;  // that an work_tile or gqa_tile is folded for: query heads, or KV heads where there are gqa_tiles
    std::int32_t heads_per_gqa_tile;  // query heads of an work_tile that are units of the same gqa_tiles
    std::int32_t swizzle_heads;  // of a swizzle_group, counted as entry_heads are: their K and V stay in the L2 cache
    std::int32_t early_entries;  // work_tiles, or gqa_tiles, that are folded in sections; the others come last
    bool keep_pace;  // one head's K and V are far more than the cache holds: CTAs read them at about the same time
  };

  // From scores to probabilities: read by the tile step, and where a row ends.
  struct Softmax {
    float scale;
    float cap;             // 0: off
    bool scaled_first;     // scores are scaled, and capped, before their maximum is taken; else the exponential scales
    float exponent;        // the factor that is left for the exponential: 1 or scale
    float exponent_base2;  // the same for base 2
  };

  // What outlives a launch, or is too large for registers: read where rows begin, and where groups and rows end.
  struct State {
    float* memory;   // device/attention_state.cuh
    bool resume;     // rows begin with what is there, else with nothing
    bool save;       // rows leave it there
    float* scratch;  // of the kernel's CTAs, during a task
  };

  // The job's shape: read everywhere.
  std::int64_t rows;  // of q, out, lse and the state
  std::int32_t heads, kv_heads;
  std::int32_t head_dim, head_dim_v;
  std::int32_t dtype;  // a ringattn::Dtype
  Mask mask;           // asked through kernels/visibility.hpp

  // The tensors: q is read where a query tile is loaded, the others where a row ends.
  StridedRows<const void> q;  // [rows, heads, head_dim]
  StridedRows<void> out;      // [rows, heads, head_dim_v]
  StridedRows<float> lse;     // [rows, heads], or null
  const float* sinks;         // [heads], or null
  bool finish;                // rows end with this task: out and lse are written

  Tables tables;
  Schedule schedule;
  Softmax softmax;
  State state;
};

// What a state's softmax_offsets count.
struct OffsetScale {
  float natural;  // one of them, in scaled scores
  float base2;    // the same in powers of two: what the merge step counts in
};

// Numbers of a row and head in a state, beside the two parts of O (device/attention_state.cuh).
inline constexpr int kStateStats = 8;

// Floats of a row and head in a state.
constexpr int state_floats(int head_dim_v) { return 2 * head_dim_v + kStateStats; }

// AttentionKernel::merge_state().
struct MergeParams {
  float* state;
  const float* partial;
  std::int64_t rows;
  std::int32_t heads, head_dim_v;
  OffsetScale offset_scale;
};

// A state as numbers (AttentionStateView): where to, and from what.
struct ExportParams {
  const float* state;
  std::int64_t rows;
  std::int32_t heads, head_dim_v;
  OffsetScale offset_scale;
  float* m;  // [rows, heads]
  std::int64_t m_token_stride, m_head_stride;
  float* l;  // [rows, heads]
  std::int64_t l_token_stride, l_head_stride;
  float* o;  // [rows, heads, head_dim_v]
  std::int64_t o_token_stride, o_head_stride;
};

}  // namespace ringattn::cuda
