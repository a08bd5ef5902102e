// SPDX-License-Identifier: Apache-2.0
// The attention kernel interface: exact attention by online softmax, with fixed-size KV splits. Within a KV split a
// row's partial (offset, sum, acc) is updated key tile by key tile, in ascending token order. Then the row's partials
// are merged, split by split, in ascending order (attention/merge.hpp). One division and one rounding end the row.
// README.md has the glossary.
//
// A kernel's result for a query row is a pure function of the row, its position, its sequence's keys and values, and
// the AttentionSpec. It does not depend on anything else in an AttentionTask: where tiles lie in memory, how they are
// grouped into tasks, which other rows are computed with it, or how many threads run. The runtime relies on this
// guarantee. Kernels do not know about ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/attention/block_mask.hpp"
#include "kernels/attention/key_positions.hpp"
#include "kernels/attention/merge.hpp"
#include "kernels/attention/visibility.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/common/cache_view.hpp"

namespace ringattn {

class AttentionKernel;

// The computation: everything that the choice of a kernel and its arithmetic may depend on. Lengths, batch size and
// ranks are not part of it.
struct AttentionSpec {
  using Kernel = AttentionKernel;  // the interface that computes this spec (common/registry.hpp)

  Dtype dtype = Dtype::kBf16;  // dtype of q, k, v and out; state and LSE are fp32
  int heads = 1;               // query heads
  int kv_heads = 1;            // divides heads
  int head_dim = 128;          // of q and k
  int head_dim_v = 128;        // of v and out
  Mask mask{-1, 0};
  float softmax_scale = 1.0F;
  float softcap = 0.0F;  // score ← softcap · tanh(score / softcap), after scaling; 0 disables it
  bool sinks = false;    // one logit per query head joins the denominator at the end
  // Rows attend only to the key tiles that the block-sparse mask has (attention/block_mask.hpp). Default: no block
  // mask.
  BlockMaskShape block_mask;
  // Position arrays per sequence (attention/key_positions.hpp): 1 for all KV heads, or one per KV head. 0: key i is at
  // position i.
  int positions = 0;

  bool operator==(const AttentionSpec&) const = default;
};

// Consecutive queries of one sequence. Rows [row, row + rows) of the task's q are at positions position, position + 1,
// …
struct QueryRun {
  std::int32_t sequence = 0;
  std::int64_t position = 0;
  std::int64_t row = 0;
  std::int64_t rows = 0;

  bool operator==(const QueryRun&) const = default;
};

// A pair of K and V tensors whose rows with the same index belong to the same token. Without pages, rows are dense or
// strided. With pages, row r is row r % page_size of page r / page_size, and the views' token strides apply within a
// page.
struct KeySource {
  TensorView k;                    // [rows, kv_heads, head_dim]
  TensorView v;                    // [rows, kv_heads, head_dim_v]
  std::int64_t page_size = 0;      // rows per page, a power of two, at least 16; 0: not paged
  std::int64_t k_page_stride = 0;  // elements from one page to the next, in k
  std::int64_t v_page_stride = 0;  // elements from one page to the next, in v

  const std::byte* k_at(std::int64_t row, std::int64_t head) const { return at(k, k_page_stride, row, head); }
  const std::byte* v_at(std::int64_t row, std::int64_t head) const { return at(v, v_page_stride, row, head); }

 private:
  const std::byte* at(const TensorView& view, std::int64_t page_stride, std::int64_t row, std::int64_t head) const {
    if (page_size == 0) return view.at(row, head);
    const auto element = static_cast<std::int64_t>(size_of(view.dtype));
    return view.at(row % page_size, head) + row / page_size * page_stride * element;
  }
};

// A page pool as a source. Token t of page p is row p · page_rows + t.
struct PoolSource {
  KeySource source;
  std::int64_t page_rows = 0;
};
// Requires k and v to have the same number of pages and the same page size. If the page stride is a multiple of the
// token stride, with the same ratio in k and v, the source is strided, which kernels read as fast as a dense one. Every
// usual axis order meets this condition.
PoolSource pool_source(const CacheView& k, const CacheView& v);

// Page runs per key tile. A tile's keys are divided into page_runs runs of key_tile / page_runs keys. Each run is
// contiguous in one source and within one page. All tiles of a task have the same number of runs. This function returns
// the minimum: 1 if the page size is a multiple of the tile.
constexpr int page_runs_per_tile(int key_tile, std::int64_t page_size) {
  return page_size == 0 ? 1 : key_tile / static_cast<int>(std::gcd(std::int64_t{key_tile}, page_size));
}

// Minimum number of keys in a page run, unless the run is the whole tile.
inline constexpr int kMinPageRunKeys = 16;

// Where a page run lies: its first key is row `row` of sources[source], and its other keys follow.
struct PageRun {
  std::int32_t source = 0;
  std::int64_t row = 0;

  bool operator==(const PageRun&) const = default;
};

// Tiles [first_tile, first_tile + tiles) of one sequence, at tile indices table, table + 1, … of AttentionTask::tiles.
// Tile t of a sequence of n keys holds keys [t · key_tile, min((t + 1) · key_tile, n)). How a sequence's tiles are
// spread over tasks does not change results, as long as each tile up to the last one is either processed or excluded by
// the mask.
struct KeyRun {
  std::int32_t sequence = 0;
  std::int64_t first_tile = 0;
  std::int64_t tiles = 0;
  std::int64_t table = 0;

  bool operator==(const KeyRun&) const = default;
};

// Destination of finished rows.
struct AttentionOutput {
  MutableTensorView out;  // [rows, heads, head_dim_v], AttentionSpec::dtype
  RowView lse;  // [rows, heads] fp32, natural logarithm; −∞ for a row that sees no key; null data: not written
  // [heads] fp32, in the kernel's memory kind; non-null exactly when AttentionSpec::sinks.
  const float* sinks = nullptr;
};

// Handle of what AttentionKernel::prepare() built for tasks of one geometry.
using PreparedTask = std::int64_t;
inline constexpr PreparedTask kNotPrepared = -1;

// Attends a rank's query rows to the tiles of one KV block. attend() reads the spans' contents and *finish before it
// returns. The memory behind views, state and sinks must live until the stream has completed the task.
struct AttentionTask {
  TensorView q;                               // [rows, heads, head_dim]
  std::span<const QueryRun> queries;          // cover every row once, ascending by (sequence, position)
  std::span<const std::int64_t> key_lengths;  // [sequences] number of keys of each sequence
  std::span<const KeyRun> key_runs;  // ascending by (sequence, first_tile), disjoint; a sequence may have several
  // [number of tiles, page_runs]: the page runs that key_runs index by tile. All page runs of one tile have the same
  // source. Page runs that hold no key of the sequence, and their entries, are not read.
  std::span<const PageRun> tiles;
  int page_runs = 1;  // page runs per tile; a run is the whole tile or a multiple of kMinPageRunKeys keys
  std::span<const KeySource> sources;
  // Non-null exactly when AttentionSpec::block_mask.any(). The key runs must hold every tile in their range that the
  // mask gives to a row.
  const BlockMask* block_mask = nullptr;
  // Positions of the sequences' keys; non-null exactly when AttentionSpec::positions > 0.
  const KeyPositions* positions = nullptr;
  // AttentionKernel::state_bytes() bytes in the kernel's memory kind; unused if neither resume nor save.
  void* state = nullptr;
  bool resume = false;  // false: the state is not read, and every row starts from the identity
  bool save = true;  // also saves rows that no tile of this task updates; false: the state need not survive this task
  const AttentionOutput* finish = nullptr;  // non-null: after this task every row is divided, rounded and written
  PreparedTask prepared = kNotPrepared;     // what prepare() returned for a task of this geometry
};

// The state in fp32 with all KV splits merged, whatever the kernel's own layout is. It is not FlashInfer's (V, LSE)
// state: o is not normalized, and m is the softmax offset, which may be below the row max.
struct AttentionStateView {
  RowView m;            // [rows, heads] softmax offset of the scaled (and capped) scores; −∞ if the row saw no key
  RowView l;            // [rows, heads] sum of exp(score − m)
  MutableTensorView o;  // [rows, heads, head_dim_v] fp32: sum of exp(score − m) · v
};

// Upper bounds over all tasks of a plan.
struct AttentionLimits {
  std::int64_t rows = 0;
  std::int64_t query_runs = 0;
  std::int64_t key_runs = 0;
  std::int64_t tiles = 0;  // entries of AttentionTask::tiles: all page runs of all tiles
  std::int64_t sources = 0;
  std::int64_t sequences = 0;
  std::int64_t prepared = 0;  // tasks passed to prepare()
  std::int64_t mask_tile_runs =
      0;  // runs of consecutive tiles in the block mask, over all query blocks of the rows and all heads
};

// An attention kernel for one AttentionSpec on one backend.
class AttentionKernel {
 public:
  virtual ~AttentionKernel() = default;

  // Keys per tile. Part of the arithmetic, fixed by the AttentionSpec.
  virtual int key_tile() const = 0;
  // Rows of a query tile share their set of key tiles: a row processes each key tile that any position of its query
  // tile [⌊p / query_tile⌋ · query_tile, …) sees. 1: exactly the tiles that the row sees.
  virtual int query_tile() const = 0;
  // Bytes of state for `rows` query rows and all heads.
  virtual std::size_t state_bytes(std::int64_t rows) const = 0;
  // Bytes that reserve() allocates for tasks within `limits`: all memory that the kernel needs besides the state.
  virtual std::size_t scratch_bytes(const AttentionLimits& limits) const = 0;
  // Called before the first attend(), so that attend() never allocates.
  virtual void reserve(const AttentionLimits& limits) = 0;
  // Builds what attend() needs for tasks with this task's geometry: everything in a task except the addresses of its
  // tensors. A task with this handle is enqueued without a wait and may be captured in a graph. Call it after
  // reserve(), whose limits count it. The handle is valid until the next reserve(). kNotPrepared: this kernel does not
  // benefit from preparation.
  virtual PreparedTask prepare(const AttentionTask&) { return kNotPrepared; }
  // Enqueues the task on `stream` (device) or runs it (host).
  virtual void attend(const AttentionTask& task, Stream stream, const Progress& progress) = 0;
  // Merges `partial` into `state`, both saved states of the same `rows` rows. `partial` must hold exactly one KV split:
  // its tasks began without resume and had tiles of that split only. All of `state` must precede that split. An
  // unfinished split in `state` counts as complete. Merging all splits in ascending order, wherever each was computed,
  // gives the state of one kernel that processes all of them. Enqueued on `stream` (device) or run immediately (host).
  virtual void merge_state(void* state, const void* partial, std::int64_t rows, Stream stream) = 0;
  // Writes the saved state of `rows` rows as (m, l, O).
  virtual void export_state(const void* state, std::int64_t rows, const AttentionStateView& view, Stream stream) = 0;
};

}  // namespace ringattn
