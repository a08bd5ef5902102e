// SPDX-License-Identifier: Apache-2.0
// What a CUDA fold kernel is given: a FoldTask's tables as they lie in device memory, and the numbers of the job.
// Plain data without vendor types, shared by the host that fills it and the kernels that read it.
#pragma once

#include <cstdint>

namespace ringattn::cuda {

// kernels/fold.hpp's KeyTile, KeySource and KeyRun for the device. Strides count elements.
struct TileEntry {
  std::int32_t source;
  std::int64_t row;
};
struct SourceEntry {
  const void* k;  // [rows, kv_heads, head_dim]
  const void* v;  // [rows, kv_heads, head_dim_v]
  std::int64_t rows;
  std::int64_t k_token_stride, k_head_stride;
  std::int64_t v_token_stride, v_head_stride;
};
// The tiles of a sequence in a task are numbered through its runs: this one's are first, first + 1, …
struct RunEntry {
  std::int64_t first_tile;
  std::int64_t first;
  std::int64_t table;
};

// Rows of one query run that walk over the key tiles together, for every head. Slots [slot_begin, slot_end) of an item
// are rows; the others are absent: their memory belongs to somebody else.
struct WorkItem {
  std::int64_t row;         // of q: of slot 0
  std::int64_t position;    // of slot 0
  std::int64_t key_length;  // of the sequence
  std::int64_t first;       // number of the first tile that the item folds, through the sequence's runs
  std::int64_t first_tile;  // that tile, and its place in the map: all that is needed where they lie in one run
  std::int64_t table;
  std::int32_t tiles;
  std::int32_t run_begin, runs;  // the entries in FoldParams::runs that hold the tiles
  std::int32_t slot_begin, slot_end;
  std::int32_t padding;
};

// Units of work that walk over their key tiles side by side, for kernels that fold several query tiles at a time: unit
// n is query head (head + n) mod group of item + (head + n) / group, where a group of query heads shares a KV head. The
// units are of one sequence; the walk covers all that any of them folds.
struct WorkBundle {
  std::int64_t first;       // number of the walk's first tile, through the sequence's runs
  std::int64_t first_tile;  // that tile, and its place in the map, where the walk lies in one run
  std::int64_t table;
  std::int32_t tiles;
  std::int32_t run_begin, runs;
  std::int32_t item, head, units;
};

inline constexpr int kNearSources = 4;

struct FoldParams {
  const void* q;  // [rows, heads, head_dim]
  std::int64_t q_token_stride, q_head_stride;
  void* out;  // [rows, heads, head_dim_v]
  std::int64_t out_token_stride, out_head_stride;
  float* lse;  // [rows, heads], or null
  std::int64_t lse_token_stride, lse_head_stride;
  const float* sinks;  // [heads], or null

  const WorkItem* items;      // [item_count]
  const WorkBundle* bundles;  // [bundle_count], for every KV head; of kernels that work in bundles
  const RunEntry* runs;
  const TileEntry* tiles;
  SourceEntry near_sources[kNearSources];  // the first ones; they are the nearest to hand, so nobody waits for them
  const SourceEntry* sources;              // all of them, where there are more
  bool all_near;
  std::int32_t item_count, bundle_count;

  std::int32_t* taken;           // counter of work that CTAs have taken, 0 at the start and when the kernel ends
  std::int32_t* tiles_done;      // [multiprocessors]: how far CTAs are that keep pace; at the start 0, or as they left
  std::int32_t multiprocessors;  // of the device
  std::int32_t walk_ctas;        // CTAs that fold a bundle side by side, each its part of the units
  float* scratch;                // what the kernel's CTAs keep outside their registers during a task
  float* state;                  // device/fold_state.cuh
  std::int64_t rows;             // of q and of the state

  std::int64_t mask_left, mask_right;  // −1: unlimited
  std::int32_t heads, kv_heads;
  std::int32_t section_heads;  // query heads that early pieces are folded for at a time: K and V stay in the L2 cache
  std::int32_t early_count;    // items, or bundles, that are folded in sections; the others come last (work_order.hpp)
  std::int32_t head_dim, head_dim_v;
  std::int32_t dtype;  // a ringattn::Dtype
  float softmax_scale;
  float softcap;  // 0: off
  // Scores are scaled, and capped, before their maximum is taken; else the scale waits for the exponential.
  bool scaled_first;
  float exponent;        // the factor that is left for the exponential: 1 or softmax_scale
  float exponent_base2;  // the same for base 2
  bool resume, save, finish;
  bool keep_pace;  // one head's K and V are far more than the cache holds: CTAs should read them at about the same time
};

// What a state's references count.
struct ReferenceUnit {
  float natural;  // one of them, in scaled scores
  float base2;    // the same in powers of two: what the merge step counts in
};

// Numbers of a row and head in a state, beside the two parts of O (device/fold_state.cuh).
inline constexpr int kStateNumbers = 8;

// Floats of a row and head in a state.
constexpr int state_floats(int head_dim_v) { return 2 * head_dim_v + kStateNumbers; }

// FoldKernel::merge_state().
struct MergeParams {
  float* state;
  const float* partial;
  std::int64_t rows;
  std::int32_t heads, head_dim_v;
  ReferenceUnit unit;
};

// A state as numbers (FoldStateView): where to, and from what.
struct ExportParams {
  const float* state;
  std::int64_t rows;
  std::int32_t heads, head_dim_v;
  ReferenceUnit unit;
  float* m;  // [rows, heads]
  std::int64_t m_token_stride, m_head_stride;
  float* l;  // [rows, heads]
  std::int64_t l_token_stride, l_head_stride;
  float* o;  // [rows, heads, head_dim_v]
  std::int64_t o_token_stride, o_head_stride;
};

}  // namespace ringattn::cuda
