// SPDX-License-Identifier: Apache-2.0
// The interface of attention backward kernels: tasks of dQ, and tasks of dK and dV. Both are left folds over fixed
// splits of tokens, so that their bits do not depend on tiles, tasks or ranks.
//
//   P = exp2(S · c − LSE · log2 e)    dP = dO · Vᵀ    delta = rowsum(dO ∘ O) − dLSE    dS = P ∘ (dP − delta)
//   dQ = softmax_scale · dS · K       dK = softmax_scale · dSᵀ · Q                     dV = Pᵀ · dO
//
// S is the forward's score, after softcap if there is one. With softcap, dS has the factor 1 − (s / softcap)², where s
// is the capped score. P and dS of a pair that the mask excludes are 0. P and dS are rounded once to the input dtype
// before they are multiplied; softmax_scale is applied once, in fp32, before the gradient is rounded, which is its only
// rounding.
//
// Order of the sums:
// - dQ of a query: within a KV split of kBackwardKvSplit keys, counted from the sequence's first key, keys ascending,
//   from zero. Splits are added in fp32, ascending.
// - dK and dV of a key: within a query split of backward_query_split() positions, counted from position 0, tiles of
//   kBackwardTile positions ascending, in each tile the query heads of the KV head ascending, from zero. Splits are
//   added in fp32, ascending.
// The first split is stored, not added to zeros. A split in which no tile is visible contributes nothing. Each kernel
// fixes how it forms the sum within a split (one chain, or sums of tiles of a fixed size).
//
// Positions are key positions: query i of a sequence is at position i + q_offset, which may be negative. Tiles of
// queries begin at multiples of kBackwardTile positions, so the first one of a sequence may hold fewer queries.
//
// A gradient row is a pure function of the row, its sequence's tensors and the spec, just as a row of the forward is
// (attention.hpp). Kernels don't know about ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

class AttentionBackwardKernel;

struct AttentionBackwardSpec {
  using Kernel = AttentionBackwardKernel;

  AttentionSpec forward;           // without block_mask and positions
  Dtype gradients = Dtype::kBf16;  // dtype of dQ, dK and dV: forward.dtype or fp32

  bool operator==(const AttentionBackwardSpec&) const = default;
};

// Positions of a tile of queries, and the smallest tile of keys.
inline constexpr int kBackwardTile = 64;
// Keys of a KV split.
inline constexpr std::int64_t kBackwardKvSplit = 8192;
// Positions of a query split: about 4096 rows of the KV head's query heads, at least one tile.
constexpr std::int64_t backward_query_split(const AttentionSpec& spec) {
  return std::int64_t{kBackwardTile} * std::max(1, kBackwardTile / (spec.heads / spec.kv_heads));
}

// Lengths of a sequence. Query i is at position i + q_offset.
struct BackwardSequence {
  std::int64_t q_len = 0;
  std::int64_t k_len = 0;
  std::int64_t q_offset = 0;

  bool operator==(const BackwardSequence&) const = default;
};

// ⌊a / b⌋ for b > 0 and any a.
constexpr std::int64_t floor_quotient(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// The position at which a sequence's first tile of queries begins. Its tile t begins kBackwardTile · t positions later.
inline std::int64_t first_query_tile(const BackwardSequence& sequence) {
  return query_tile_begin(sequence.q_offset, kBackwardTile);
}

// LSE · log2 e (0 for a row that sees no key) and delta of query rows: dense fp32 [rows, heads, 2].
inline constexpr std::int64_t kRowStats = 2;

// Computes the row stats of queries. Every pointer is to the kernel's kind of memory.
struct RowStatsTask {
  TensorView out;   // [rows, heads, head_dim_v], of the forward
  TensorView dout;  // [rows, heads, head_dim_v]
  RowView lse;      // [rows, heads], natural logarithm, −∞ for a row that sees no key and has no sink; only read
  RowView dlse;     // [rows, heads] gradient of LSE; null data: 0
  float* stats = nullptr;  // [rows, heads, kRowStats], written
  // With sinks: the forward's [heads] sinks, and for each row its term −exp(sink − LSE) · delta of the sinks' gradient,
  // dense [rows, heads], written. Both null otherwise.
  const float* sinks = nullptr;
  float* sink_terms = nullptr;
};

// Sums of rows of floats in a fixed order. Every pointer is to the kernel's kind of memory.
struct RowSumsTask {
  const float* rows = nullptr;          // [*, heads]
  const std::int64_t* order = nullptr;  // the rows that are added, one sum after another; null: 0, 1, …
  const std::int64_t* begins = nullptr;  // [count + 1]: sum i adds rows order[begins[i]], …, order[begins[i + 1] − 1]
  std::int64_t count = 0;                // sums
  float* sums = nullptr;                 // [count, heads], written: the first row is stored; no rows: 0
};

// Keys in tiles, which dQ's tasks read. Row `PageRun::row` of a source is the tile's first key.
struct BackwardKeySource {
  TensorView k;  // [rows, kv_heads, head_dim]
  TensorView v;  // [rows, kv_heads, head_dim_v]
};

// Queries in tiles, which the tasks of dK and dV read. Row `PageRun::row` of a source is the tile's first query.
struct BackwardQuerySource {
  TensorView q;                  // [rows, heads, head_dim]
  TensorView dout;               // [rows, heads, head_dim_v]
  const float* stats = nullptr;  // [rows, heads, kRowStats]
};

// Members that the tasks of dQ and of dK and dV share. Spans are read before the call returns; the memory behind views
// and `state` must live until the stream has completed the task.
struct BackwardTask {
  std::span<const BackwardSequence> sequences;
  // The rank's rows whose gradient is computed. dQ: queries at positions `position`, …. dK and dV: keys `position`, ….
  // Ascending by (sequence, position); together they cover every row once.
  std::span<const QueryRun> rows;
  // The tiles of the other side, ascending by (sequence, first_tile), disjoint. dQ: tile t of a sequence holds its keys
  // [t · key_tile(), …). dK and dV: tile t holds its queries at positions first_query_tile() + [t, t + 1) ·
  // kBackwardTile. Every tile that a row sees is in exactly one of the tasks of the row, and these come in order.
  std::span<const KeyRun> runs;
  std::span<const PageRun> tiles;  // [tiles of `runs`]
  // {dq,dkv}_state_bytes() bytes; unused if neither resume nor save.
  void* state = nullptr;
  bool resume = false;  // false: the state is not read, and every row starts without a sum
  bool save = true;     // also saves rows that no tile updates; false: the state need not survive this task
};

struct DqTask : BackwardTask {
  TensorView q;                  // [rows, heads, head_dim]
  TensorView dout;               // [rows, heads, head_dim_v]
  const float* stats = nullptr;  // [rows, heads, kRowStats]
  std::span<const BackwardKeySource> sources;
  // Not null: every row is scaled, rounded and written after this task, with 0 for a row without keys.
  const MutableTensorView* dq = nullptr;  // [rows, heads, head_dim], AttentionBackwardSpec::gradients
};

struct DkvTask : BackwardTask {
  TensorView k;  // [rows, kv_heads, head_dim]
  TensorView v;  // [rows, kv_heads, head_dim_v]
  std::span<const BackwardQuerySource> sources;
  // Either both are null or neither is; see DqTask::dq.
  const MutableTensorView* dk = nullptr;  // [rows, kv_heads, head_dim]
  const MutableTensorView* dv = nullptr;  // [rows, kv_heads, head_dim_v]
};

// Whether add_dq_and_dkv() may compute the scores once for both tasks. The bits are the same.
enum class ScoreSharing {
  kNever,       // it is not called
  kIfFaster,    // by speed on an H200
  kIfPossible,  // for tests: even if it is slower, and with less memory
};

// Upper bounds over all tasks, of dQ and of dK and dV.
struct BackwardLimits {
  std::int64_t rows = 0;  // queries or keys
  std::int64_t row_runs = 0;
  std::int64_t tile_runs = 0;
  std::int64_t tiles = 0;
  std::int64_t sequences = 0;
  ScoreSharing sharing = ScoreSharing::kNever;
};

// The backward kernels for one spec on one backend.
class AttentionBackwardKernel {
 public:
  virtual ~AttentionBackwardKernel() = default;

  // Keys per tile: a multiple of kBackwardTile that divides kBackwardKvSplit. A task has each tile of keys that any
  // position of the tile of a query sees, and each tile of queries that any key of the tile of a key sees. A kernel may
  // skip a tile that the row itself does not see: it adds nothing to the row.
  virtual int key_tile() const = 0;
  // Bytes of state for `rows` queries of all heads, and for `rows` keys of all KV heads.
  virtual std::size_t dq_state_bytes(std::int64_t rows) const = 0;
  virtual std::size_t dkv_state_bytes(std::int64_t rows) const = 0;
  // Bytes that reserve() allocates: all memory that the kernels need besides states.
  virtual std::size_t scratch_bytes(const BackwardLimits& limits) const = 0;
  // Called before the first task, so that tasks never allocate.
  virtual void reserve(const BackwardLimits& limits) = 0;

  // Enqueue a task on `stream` (device) or run it (host).
  virtual void row_stats(const RowStatsTask& task, Stream stream, const Progress& progress) = 0;
  virtual void sum_rows(const RowSumsTask& task, Stream stream) = 0;
  virtual void add_dq(const DqTask& task, Stream stream, const Progress& progress) = 0;
  virtual void add_dkv(const DkvTask& task, Stream stream, const Progress& progress) = 0;
  // Runs both tasks, which have the same pairs: the rows of each are in the tiles of the other. A kernel may compute
  // the scores once for both. The bits are those of two separate calls, so a kernel is free to choose.
  virtual void add_dq_and_dkv(const DqTask& dq, const DkvTask& dkv, Stream stream, const Progress& progress) {
    add_dq(dq, stream, progress);
    add_dkv(dkv, stream, progress);
  }
};

// One line that says what a spec needs, e.g. "backward of bf16, heads 32/8 (GQA 4:1), head_dim 128, causal".
std::string describe(const AttentionBackwardSpec& spec);

// What no backward kernel supports, one string per requirement (KernelRow::missing).
std::vector<std::string> missing_in_backward(const AttentionBackwardSpec& spec);

// Throw kInternal if a task does not match the spec and the tiles.
void check_backward_task(const AttentionBackwardSpec& spec, int key_tile, const DqTask& task);
void check_backward_task(const AttentionBackwardSpec& spec, const DkvTask& task);

}  // namespace ringattn
