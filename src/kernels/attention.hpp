// SPDX-License-Identifier: Apache-2.0
// The fold. Within a group of key tiles (r, l, A) ← fold((r, l, A), key tile), in ascending token order; then a row's
// groups are merged, in ascending order too (merge.hpp), and at the end stand one division and one rounding. This
// header is what a kernel promises to the engine. Kernels know nothing of ranks. README.md explains the words.
//
// A kernel's result for a query row is a pure function of the row, its position, its sequence's keys and values, and
// the AttentionSpec. It depends on nothing that a AttentionTask says about *where* tiles lie, how they are grouped into
// tasks, which other rows are folded beside it, or how many threads run. That is the promise that the whole runtime
// rests on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/backend.hpp"
#include "kernels/block_mask.hpp"
#include "kernels/cache_view.hpp"
#include "kernels/key_positions.hpp"
#include "kernels/merge.hpp"
#include "kernels/visibility.hpp"

namespace ringattn {

class AttentionKernel;

// What is computed: all that the choice of a kernel and its arithmetic may depend on. Lengths, batch and ranks are
// absent.
struct AttentionSpec {
  using Kernel = AttentionKernel;  // what computes it (registry.hpp)

  Dtype dtype = Dtype::kBf16;  // of q, k, v and out; state and LSE are fp32
  int heads = 1;               // query heads
  int kv_heads = 1;            // divides heads
  int head_dim = 128;          // of q and k
  int head_dim_v = 128;        // of v and out
  Mask mask{-1, 0};
  float softmax_scale = 1.0F;
  float softcap = 0.0F;  // score ← softcap · tanh(score / softcap), after scaling; 0 is off
  bool sinks = false;    // a logit per query head joins the denominator at the end
  BlockMaskShape
      block_mask;     // rows fold listed key tiles alone (block_mask.hpp); by default all that the mask lets through
  int positions = 0;  // lists of positions of a sequence's keys (key_positions.hpp): 1 for all K/V heads, or one
                      // each; 0: key i stands at position i

  bool operator==(const AttentionSpec&) const = default;
};

// Consecutive queries of one sequence: rows [row, row + rows) of the task's q stand at positions position, position +
// 1, …
struct QueryRun {
  std::int32_t sequence = 0;
  std::int64_t position = 0;
  std::int64_t row = 0;
  std::int64_t rows = 0;

  bool operator==(const QueryRun&) const = default;
};

// Where keys and values lie: rows of two tensors, of which those with the same index belong to the same token. Dense or
// strided; or pages that are anyhow apart: with a page size, row r is row r % page_size of page r / page_size, and the
// token strides are those inside of a page.
struct KeySource {
  TensorView k;                    // [rows, kv_heads, head_dim]
  TensorView v;                    // [rows, kv_heads, head_dim_v]
  std::int64_t page_size = 0;      // rows, a power of two from 16 on; 0: no pages
  std::int64_t k_page_stride = 0;  // elements from page to page, of k
  std::int64_t v_page_stride = 0;  // and of v

  const std::byte* k_at(std::int64_t row, std::int64_t head) const { return at(k, k_page_stride, row, head); }
  const std::byte* v_at(std::int64_t row, std::int64_t head) const { return at(v, v_page_stride, row, head); }

 private:
  const std::byte* at(const TensorView& view, std::int64_t page_stride, std::int64_t row, std::int64_t head) const {
    if (page_size == 0) return view.at(row, head);
    const auto element = static_cast<std::int64_t>(size_of(view.dtype));
    return view.at(row % page_size, head) + row / page_size * page_stride * element;
  }
};

// A pool of pages as a source. Token t of page p is row p · page_rows + t.
struct PoolSource {
  KeySource source;
  std::int64_t page_rows = 0;
};
// k and v have as many pages, of as many tokens. Where a page's tokens are as far from the next page's as a multiple of
// what they are from each other, the same one in k and in v, the source is a strided one, which kernels read as fast as
// a dense one. That is so in every usual order of axes.
PoolSource pool_source(const CacheView& k, const CacheView& v);

// A key tile is mapped in page_runs, as many for each tile of a task: its keys are cut into runs of key_tile /
// page_runs, and the keys of a piece follow each other in a source, inside of one page. The fewest page_runs that tiles
// in pages take: one where pages are a multiple of the tile.
constexpr int page_runs_per_tile(int key_tile, std::int64_t page_size) {
  return page_size == 0 ? 1 : key_tile / static_cast<int>(std::gcd(std::int64_t{key_tile}, page_size));
}

// Fewer keys than these are no piece, unless it is the whole tile.
inline constexpr int kMinPageRunKeys = 16;

// The map from a piece of a tile to where it lies: its first key is row `row` of sources[source], its other keys
// follow.
struct PageRun {
  std::int32_t source = 0;
  std::int64_t row = 0;

  bool operator==(const PageRun&) const = default;
};

// Tiles [first_tile, first_tile + tiles) of one sequence, which are the tiles table, table + 1, … of the task's map.
// Tile t of a sequence of n keys holds keys [t · key_tile, min((t + 1) · key_tile, n)). Bits don't depend on how a
// sequence's tiles are spread over tasks as long as every tile up to the last is folded, or left out by the mask.
struct KeyRun {
  std::int32_t sequence = 0;
  std::int64_t first_tile = 0;
  std::int64_t tiles = 0;
  std::int64_t table = 0;

  bool operator==(const KeyRun&) const = default;
};

// Where finished rows go.
struct AttentionOutput {
  MutableTensorView out;  // [rows, heads, head_dim_v], AttentionSpec::dtype
  RowView lse;  // [rows, heads] fp32, natural logarithm; −∞ for a row that sees no key; no data: not wanted
  const float* sinks =
      nullptr;  // [heads] fp32, present exactly when AttentionSpec::sinks; in the kernel's kind of memory
};

// What AttentionKernel::prepare() has built for tasks of one geometry.
using PreparedTask = std::int64_t;
inline constexpr PreparedTask kNotPrepared = -1;

// Folds the tiles of one block into all of a rank's query rows. What the spans point to, and *finish, is read before
// fold() returns; the memory behind views, state and sinks lives until the stream has passed the task.
struct AttentionTask {
  TensorView q;                               // [rows, heads, head_dim]
  std::span<const QueryRun> queries;          // cover every row once, ascending by (sequence, position)
  std::span<const std::int64_t> key_lengths;  // [sequences] keys of each sequence
  std::span<const KeyRun> key_runs;  // ascending by (sequence, first_tile), disjoint; a sequence may have several
  // The map that key_runs index: tile i of it is entries [i · page_runs, (i + 1) · page_runs). The page_runs of a tile
  // lie in one source. Those that hold no key of the sequence are not read, and neither are their entries.
  std::span<const PageRun> tiles;
  int page_runs = 1;  // of a tile; a piece is the whole tile or a multiple of kMinPageRunKeys
  std::span<const KeySource> sources;
  const BlockMask* block_mask = nullptr;  // of the sequences, present exactly where AttentionSpec::block_mask are; the
                                          // key runs hold every listed tile in their range that a row folds
  const KeyPositions* positions =
      nullptr;  // of the sequences' keys, present exactly where AttentionSpec::positions are
  void* state =
      nullptr;  // AttentionKernel::state_bytes(), of the kernel's memory kind; unused if neither resume nor save
  bool resume = false;  // false: the state is not read, every row starts from the identity
  bool save = true;     // rows that fold nothing here are saved too; false: the state need not survive this task
  const AttentionOutput* finish = nullptr;  // not null: after this task every row is divided, rounded and written
  PreparedTask prepared = kNotPrepared;     // what prepare() returned for a task of this geometry
};

// The state of rows as numbers, all groups merged, whatever the kernel really holds. O is not normalised.
struct AttentionStateView {
  RowView m;            // [rows, heads] reference of the scaled (and capped) score; −∞ where nothing was folded
  RowView l;            // [rows, heads] sum of exp(score − m)
  MutableTensorView o;  // [rows, heads, head_dim_v] fp32: sum of exp(score − m) · v
};

// The most of each kind that any one task of a plan holds.
struct AttentionLimits {
  std::int64_t rows = 0;
  std::int64_t query_runs = 0;
  std::int64_t key_runs = 0;
  std::int64_t tiles = 0;  // entries of AttentionTask::tiles: all page_runs of all tiles
  std::int64_t sources = 0;
  std::int64_t sequences = 0;
  std::int64_t prepared = 0;        // tasks that are handed to prepare()
  std::int64_t mask_tile_runs = 0;  // runs of listed tiles, over all query blocks of the rows and all heads
};

// One fold kernel for one AttentionSpec on one backend.
class AttentionKernel {
 public:
  virtual ~AttentionKernel() = default;

  // Keys of a tile; part of the arithmetic, fixed by the AttentionSpec.
  virtual int key_tile() const = 0;
  // Rows that share their set of key tiles: a row folds the tiles that any position of its own query tile
  // [⌊p / query_tile⌋ · query_tile, …) sees. 1: exactly the tiles that the row sees.
  virtual int query_tile() const = 0;
  // Bytes of fold state for `rows` query rows, all heads.
  virtual std::size_t state_bytes(std::int64_t rows) const = 0;
  // Bytes that reserve() allocates for tasks within `limits`: all that the kernel needs beside the state.
  virtual std::size_t scratch_bytes(const AttentionLimits& limits) const = 0;
  // Called before the first fold(), so that nothing is allocated in the middle of a plan.
  virtual void reserve(const AttentionLimits& limits) = 0;
  // Builds what fold() needs for tasks of this one's geometry, which is everything in a task but the addresses of its
  // tensors. A task that names the answer is enqueued without a wait, and may be captured in a graph. Called behind
  // reserve(), whose limits count it; lasts until the next reserve(). kNotPrepared: this kernel gains nothing by it.
  virtual PreparedTask prepare(const AttentionTask&) { return kNotPrepared; }
  // Enqueues the task on `stream` (device) or does it (host).
  virtual void attend(const AttentionTask& task, Stream stream, const Progress& progress) = 0;
  // Merges `partial` into `state`, both saved states of the same `rows` rows: `partial` holds one group (its tasks
  // began without resume and folded tiles of one group alone), and all of `state` comes before that group. What `state`
  // holds of an unfinished group counts as that whole group. Merging all groups of rows in ascending order, wherever
  // each was folded, leaves what folding them in one place would. Enqueued on `stream` (device) or done (host).
  virtual void merge_state(void* state, const void* partial, std::int64_t rows, Stream stream) = 0;
  // Writes the saved state of `rows` rows as (m, l, O).
  virtual void export_state(const void* state, std::int64_t rows, const AttentionStateView& view, Stream stream) = 0;
};

}  // namespace ringattn
