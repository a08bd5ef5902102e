// SPDX-License-Identifier: Apache-2.0
// Parameters of a CUDA attention kernel: the tables of an AttentionTask as they lie in device memory, and the job's
// shape. Plain data without vendor types: the host (cuda_attention.cpp) fills it, and kernels read it. After it come
// the launchers, and the order in which work tiles start.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "base/memory.hpp"
#include "kernels/attention/visibility.hpp"

namespace ringattn::cuda {

// Device copies of PageRun, KeySource and KeyRun (kernels/attention/attention.hpp). Strides count elements.
struct TileEntry {
  std::int32_t source;
  std::int64_t row;
};
inline constexpr std::int64_t kNoPages = 62;  // value of page_log when the source is a single page
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
// The tiles of a sequence that a task has are numbered 0, 1, … through all of its runs. With a block-sparse mask, each
// row of the mask has runs of its own, and the tiles that are both in the mask and in the task are numbered. A run's
// first tile has number `first`. It is tile `first_tile` of the sequence and entry `table` of the page map
// (AttentionParams::Tables::tiles).
struct RunEntry {
  std::int64_t first_tile;
  std::int64_t first;
  std::int64_t table;
};

// Query rows of one run that attend to the same KV tiles, or to nearly the same ones in kernels without query tiles.
// Rows [valid_row_begin, valid_row_end) of the tile are valid. The memory of the others belongs to other work tiles. A
// work tile is scheduled once for each of Schedule::entry_heads heads from `head` on: for all heads, unless heads have
// block masks or key positions of their own.
struct WorkTile {
  std::int64_t row;         // index in q of the tile's row 0, valid or not
  std::int64_t position;    // of the tile's row 0, in the sequence
  std::int64_t key_length;  // of the sequence
  // The first KV tile that the work tile attends to: its number in the sequence's runs, its number in the sequence, and
  // its entry in the page map. If all tiles lie in one run, the other tiles follow in all three.
  std::int64_t first, first_tile, table;
  std::int32_t tiles;
  std::int32_t run_begin, runs;  // the entries in AttentionParams::Tables::runs that hold the tiles
  std::int32_t valid_row_begin, valid_row_end;
  std::int32_t
      split_position;  // index of the first tile among the row's KV tiles, modulo kTilesPerKvSplit: the tile
                       // with index n belongs to KV split n / kTilesPerKvSplit (kernels/attention/block_mask.hpp)
  std::int32_t head;   // the first query head
  // Set for work tiles with several runs or with explicit key positions: tiles [unmasked_begin, unmasked_end) are
  // visible to every row in full and need no mask.
  std::int32_t unmasked_begin, unmasked_end;
  std::int32_t position_list;  // which of the position lists of AttentionParams::Tables::positions
};

// Head work tiles (one query head of a WorkTile each) of one sequence, or of one row of a block mask, that a CTA or a
// CTA cluster processes together. `heads_per_gqa_tile` query heads share a KV head. Head work tile n belongs to work
// tile `work_tile` + (head + n) / heads_per_gqa_tile and to query head (head + n) % heads_per_gqa_tile of that KV head.
struct GqaPackedTile {
  std::int64_t first, first_tile, table;  // of the KV loop's first tile, as in WorkTile
  std::int32_t tiles;
  std::int32_t run_begin, runs;
  std::int32_t work_tile, head, head_tiles;
};

// The first sources are passed in the launch parameters themselves, so that no global load is needed.
inline constexpr int kInlineSources = 4;

// Rows of a tensor for each of its heads. The elements of a row are contiguous. Strides count elements.
template <class Data>
struct StridedRows {
  Data* data;
  std::int64_t token_stride, head_stride;
};

// The parameters of a launch, grouped by which part of a kernel reads them.
struct AttentionParams {
  // The work and where its keys lie. Read where a CTA, or its scheduler warp, takes work and looks up tiles.
  struct Tables {
    const WorkTile* work_tiles;      // [work_tile_count]
    const GqaPackedTile* gqa_tiles;  // [gqa_tile_count], for each KV head; empty for kernels without them
    const RunEntry* runs;
    const TileEntry* tiles;
    // [tiles of the page map, position_lists, key_tile]: position of each key, kNoPosition after a sequence's last key
    // (kernels/attention/key_positions.hpp). Null: key i of a sequence has position i.
    const std::int32_t* positions;
    std::int32_t position_lists;                 // 1 for all KV heads, or one for each
    SourceEntry inline_sources[kInlineSources];  // the first kInlineSources sources, in the launch parameters
    const SourceEntry* sources;                  // all sources, if there are more than kInlineSources
    bool all_inline;                             // there are at most kInlineSources sources
    std::int32_t page_runs;                      // entries of `tiles` per KV tile
    std::int32_t work_tile_count, gqa_tile_count;
  };

  // The order of work and its distribution. Read by the launch, the scheduler (work_index()) and the pacing warp.
  struct Schedule {
    std::int32_t* taken;           // work counter; 0 at the start and when the kernel ends
    std::int32_t* tiles_done;      // [multiprocessors]: KV tiles begun by each CTA that keeps pace; 0 before the first
                                   // task, then what the task before left
    std::int32_t multiprocessors;  // of the device
    std::int32_t cluster_ctas;     // CTAs of a cluster that share a gqa_tile's head work tiles
    std::int32_t entry_heads;      // heads per entry: query heads, or KV heads if there are gqa_tiles
    std::int32_t heads_per_gqa_tile;  // query heads of a work tile that go into the same gqa_tiles
    std::int32_t swizzle_heads;       // heads of an L2 swizzle group, counted as entry_heads; their K and V stay in L2
    std::int32_t early_entries;       // entries that are ordered in swizzle groups; the late ones follow
    bool keep_pace;                   // one head's K and V far exceed L2, so CTAs read them at about the same time
  };

  // From scores to probabilities. Read by the softmax of a KV tile and by the epilogue.
  struct Softmax {
    float scale;
    float cap;             // 0: off
    bool scaled_first;     // scale and cap scores before their row maximum; else the exponential applies the scale
    float exponent;        // factor left for the exponential: 1 or scale
    float exponent_base2;  // `exponent` times log2(e)
  };

  // Memory outside a launch's registers. Read where rows begin and where KV splits and rows end.
  struct State {
    float* memory;   // attention_state.cuh
    bool resume;     // rows begin from the saved state, else from the empty state
    bool save;       // rows save their state
    float* scratch;  // per-CTA scratch memory, [multiprocessors, DeviceKernel::scratch_floats]
  };

  // The job's shape, read everywhere.
  std::int64_t rows;  // of q, out, lse and the state
  std::int32_t heads, kv_heads;
  std::int32_t head_dim, head_dim_v;
  std::int32_t dtype;  // a ringattn::Dtype
  Mask mask;           // evaluated by kernels/attention/visibility.hpp

  // The tensors. q is read where a query tile is loaded, the others in the epilogue.
  StridedRows<const void> q;  // [rows, heads, head_dim]
  StridedRows<void> out;      // [rows, heads, head_dim_v]
  StridedRows<float> lse;     // [rows, heads], or null
  const float* sinks;         // [heads], or null
  bool finish;                // the task is the rows' last one: write out and lse

  Tables tables;
  Schedule schedule;
  Softmax softmax;
  State state;
};

// Unit of a state's softmax_offset.
struct OffsetScale {
  float natural;  // one unit in scaled scores
  float base2;    // one unit in powers of two; the unit of merge_step()
};

// Scalars per row and head of a state, next to the two output accumulators (attention_state.cuh).
inline constexpr int kStateStats = 8;

// Floats per row and head of a state.
constexpr int state_floats(int head_dim_v) { return 2 * head_dim_v + kStateStats; }

// Arguments of AttentionKernel::merge_state().
struct MergeParams {
  float* state;
  const float* partial;
  std::int64_t rows;
  std::int32_t heads, head_dim_v;
  OffsetScale offset_scale;
};

// Arguments of AttentionKernel::export_state(): the saved state and the strides of the exported (m, l, O).
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

// AttentionKernel::merge_state() of the CUDA kernels: merges saved states of KV splits computed elsewhere.
void merge_tensor_state(const MergeParams& params, Stream stream);  // states of tensor-core kernels
void merge_simt_state(const MergeParams& params, Stream stream);    // states of sm80_simt

// Exports saved states of the CUDA kernels as (m, l, O). See AttentionKernel::export_state().
void export_tensor_state(const ExportParams& params, Stream stream);  // states of tensor-core kernels
void export_simt_state(const ExportParams& params, Stream stream);    // states of sm80_simt

// How the host reaches a compiled attention kernel. Each kernel's .cu files define one constant of this type for each
// compiled pair of element type and configuration.
struct Launcher {
  // Loads the kernel on the current device, so that no launch has to load it while peers wait. Throws kUnsupported if
  // the kernel was not compiled for the device, or the device's error.
  void (*prepare)();
  // Enqueues attention for all work tiles or gqa_tiles of `params`, of which there is at least one. Throws if the
  // launch fails.
  void (*launch)(const AttentionParams& params, Stream stream);
};

// The order in which the entries of a task (work tiles or GQA-packed tiles) start, and for which heads.
//
// Entries whose K and V fit into the L2 cache together form an L2 swizzle group. The early entries come first. They are
// ordered by swizzle group of heads, then by swizzle group of entries. In a swizzle group the longest entry comes
// first, and an entry's heads follow each other. The late entries, which are short, come last, the longest first, each
// for all heads. The host sorts the entries (SchedulerOrder in work_tiles.hpp), and a kernel computes its entry with
// work_index().

struct WorkIndex {
  int entry;
  int head;
};

// Returns the entry and head with number `index` in this order. The first `early_entries` entries are early, and a
// swizzle group has `swizzle_heads` of the `heads` heads. Heads are query heads, or KV heads if entries are gqa_tiles.
RINGATTN_HOST_DEVICE inline WorkIndex work_index(int early_entries, int heads, int swizzle_heads, int index) {
  const int early = early_entries * heads;
  if (index >= early) return {early_entries + (index - early) / heads, (index - early) % heads};
  const int swizzle_group_work = early_entries * swizzle_heads;
  const int in_swizzle_group = index % swizzle_group_work;
  return {in_swizzle_group / swizzle_heads,
          index / swizzle_group_work * swizzle_heads + in_swizzle_group % swizzle_heads};
}

}  // namespace ringattn::cuda
