// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/cpu/gradient_tile.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/attention/cpu/attention_state.hpp"

namespace ringattn::cpu {

namespace {

// Consecutive tiles that a work tile processes, and the index of the first one in BackwardTask::tiles.
struct TileRun {
  TileRange tiles;
  std::int64_t table;
};

// A tile of the task: its tokens, which are the columns of scores, in the positions of GradientScratch::columns.
struct TileColumns {
  KeyRange tokens;
  bool begins_split = false;
};

void add(const float* from, std::size_t count, float* to) {
  for (std::size_t i = 0; i < count; ++i) to[i] += from[i];
}

template <typename Element, typename Round>
void write_as(const float* sums, int dim, float scale, std::byte* out, Round round) {
  auto* elements = reinterpret_cast<Element*>(out);
  for (int i = 0; i < dim; ++i) elements[i] = round(one_nan(sums[i] * scale));
}

// Scales, rounds and writes one row.
void write_gradient(const float* sums, int dim, float scale, Dtype dtype, std::byte* out) {
  switch (dtype) {
    case Dtype::kF32:
      return write_as<float>(sums, dim, scale, out, [](float x) { return x; });
    case Dtype::kBf16:
      return write_as<std::uint16_t>(sums, dim, scale, out, float_to_bf16);
    case Dtype::kF16:
      return write_as<std::uint16_t>(sums, dim, scale, out, float_to_f16);
  }
}

// A work tile of one KV head during a task. `stacked` rows are token by token, the heads of a token adjacent.
class GradientTile {
 public:
  void run(const WorkTile& work_tile, bool writes, const Checkpoint& checkpoint) {
    find_rows(work_tile);
    const std::vector<TileRun> runs = find_tile_runs();
    const bool nothing_changes = task_.resume && runs.empty();
    if (nothing_changes && !writes) return;
    load_state();
    if (!runs.empty()) load_rows();
    for (const TileRun& run : runs) {
      for (std::int64_t tile = run.tiles.begin; tile < run.tiles.end; ++tile) {
        const PageRun& at = task_.tiles[static_cast<std::size_t>(run.table + tile - run.tiles.begin)];
        if (!add_tile(tile, at, checkpoint)) return;
      }
    }
    if (task_.save && !nothing_changes) save_state();
    if (!writes) return;
    for (std::size_t at = 0; at < stacked(rows_); ++at) close_split(at);
    for (int i = 0; i < rows_; ++i) {
      for (int h = 0; h < row_heads_; ++h) write(scratch_.row[i], h, stacked(i) + static_cast<std::size_t>(h));
    }
  }

 protected:
  GradientTile(const AttentionBackwardSpec& spec, const BackwardOps& ops, const BackwardTask& task,
               std::int32_t sequence, int kv_head, GradientScratch& scratch)
      : spec_(spec.forward),
        gradients_(spec.gradients),
        ops_(ops),
        scratch_(scratch),
        lengths_(task.sequences[static_cast<std::size_t>(sequence)]),
        kv_head_(kv_head),
        group_(spec.forward.heads / spec.forward.kv_heads),
        task_(task),
        sequence_(sequence) {}
  ~GradientTile() = default;

  // For dQ, the keys that the query at `position` sees; for dK and dV, the queries that see the key there. Also their
  // tiles.
  virtual KeyRange columns_of_row(std::int64_t position) const = 0;
  virtual TileRange tiles_of_columns(const KeyRange& columns) const = 0;
  virtual TileColumns columns_of_tile(std::int64_t tile) const = 0;
  // Widens the rows.
  virtual void load_rows() = 0;
  // Packs the tokens at `at` of one of the tile's heads, 0 ≤ head < tile_heads_.
  virtual void pack(const PageRun& at, int head, int count) = 0;
  // Writes the gradient of a row and one of its heads, whose closed sums are at `at`.
  virtual void write(std::int64_t row, int head, std::size_t at) const = 0;

  std::size_t stacked(int row) const { return static_cast<std::size_t>(row) * static_cast<std::size_t>(row_heads_); }
  TileShape shape() const {
    return {spec_.dtype, spec_.head_dim, spec_.head_dim_v, spec_.softmax_scale, spec_.softcap};
  }
  TileRows rows_from(const TensorView& view, std::int64_t row, std::int64_t head) const {
    return {{view.at(row, head)}, view.token_stride * static_cast<std::int64_t>(size_of(spec_.dtype))};
  }
  std::size_t dx_stride() const { return static_cast<std::size_t>(ops_.row_stride(spec_.head_dim)); }
  std::size_t dy_stride() const { return static_cast<std::size_t>(ops_.row_stride(spec_.head_dim_v)); }

  const AttentionSpec& spec_;
  Dtype gradients_;
  const BackwardOps& ops_;
  GradientScratch& scratch_;
  const BackwardSequence& lengths_;
  int kv_head_;
  int group_;  // query heads of the KV head
  // Set by the subclass.
  int row_heads_ = 1;   // heads of a row of the work tile
  int tile_heads_ = 1;  // heads of a tile of the task
  int all_heads_ = 1;   // heads of a row in the state
  int rows_ = 0;

 private:
  void find_rows(const WorkTile& work_tile) {
    rows_ = static_cast<int>(work_tile.rows);
    for_each_query_run(task_.rows, work_tile,
                       [&](std::int64_t first, std::int64_t count, const QueryRun& run, std::int64_t offset) {
                         for (std::int64_t i = 0; i < count; ++i) {
                           scratch_.row[first + i] = run.row + offset + i;
                           const KeyRange columns = columns_of_row(run.position + offset + i);
                           scratch_.columns[first + i] = columns;
                           scratch_.tiles[first + i] = columns.empty() ? TileRange{} : tiles_of_columns(columns);
                         }
                       });
  }

  std::vector<TileRun> find_tile_runs() const {
    TileRange seen{std::numeric_limits<std::int64_t>::max(), 0};
    for (int i = 0; i < rows_; ++i) {
      const TileRange& row = scratch_.tiles[i];
      if (row.empty()) continue;
      seen = {std::min(seen.begin, row.begin), std::max(seen.end, row.end)};
    }
    std::vector<TileRun> found;
    const auto [begin, end] =
        std::equal_range(task_.runs.begin(), task_.runs.end(), KeyRun{sequence_, 0, 0, 0},
                         [](const KeyRun& a, const KeyRun& b) { return a.sequence < b.sequence; });
    for (auto run = begin; run != end; ++run) {
      const TileRange both{std::max(seen.begin, run->first_tile), std::min(seen.end, run->first_tile + run->tiles)};
      if (!both.empty()) found.push_back({both, run->table + both.begin - run->first_tile});
    }
    return found;
  }

  // Adds a tile to the rows that see a token of it. Returns false if the checkpoint says so.
  bool add_tile(std::int64_t tile, const PageRun& at, const Checkpoint& checkpoint) {
    const auto sees = [&](const TileRange& range) { return range.begin <= tile && tile < range.end; };
    const TileRange* const ranges = scratch_.tiles;
    const TileColumns columns = columns_of_tile(tile);
    const auto count = static_cast<int>(columns.tokens.end - columns.tokens.begin);
    for (int head = 0; head < tile_heads_; ++head) {
      if (checkpoint.should_stop()) return false;
      bool packed = false;
      // The rows that see the tile are consecutive, unless rows between them see no tile at all.
      for (int last = 0; last < rows_;) {
        const auto first = static_cast<int>(std::find_if(ranges + last, ranges + rows_, sees) - ranges);
        last = static_cast<int>(std::find_if_not(ranges + first, ranges + rows_, sees) - ranges);
        if (first == last) break;
        if (!packed) pack(at, head, count);
        packed = true;
        // A row's tiles have no gaps, so it processes the first tile of a split if it saw an earlier one.
        if (columns.begins_split && head == 0) {
          for (std::size_t row = stacked(first); row < stacked(last); ++row) close_split(row);
        }
        add_rows(columns.tokens.begin, count, first, last);
      }
    }
    return true;
  }

  // Adds the packed tile to rows [first, last).
  void add_rows(std::int64_t first_token, int count, int first, int last) {
    for (int i = first; i < last; ++i) {
      std::fill_n(scratch_.visible + stacked(i), row_heads_, columns_of(scratch_.columns[i], first_token, count));
      std::for_each(scratch_.flags + stacked(i), scratch_.flags + stacked(i + 1), [](int& f) { f |= kHasOpen; });
    }
    const std::size_t start = stacked(first);
    const bool rows_have_stats = scratch_.lse2 != nullptr;
    const BackwardRows rows{scratch_.x + start * static_cast<std::size_t>(spec_.head_dim),
                            scratch_.y + start * static_cast<std::size_t>(spec_.head_dim_v),
                            rows_have_stats ? scratch_.lse2 + start : nullptr,
                            rows_have_stats ? scratch_.delta + start : nullptr,
                            scratch_.dx + start * dx_stride(),
                            scratch_.dy == nullptr ? nullptr : scratch_.dy + start * dy_stride(),
                            scratch_.visible + start,
                            (last - first) * row_heads_};
    ops_.add(shape(), scratch_.tile, rows, scratch_.scores, scratch_.dp);
  }

  // Calls visit(current, closed, dim) for dX of a row and, for dK and dV, for dY.
  template <typename Visit>
  void for_each_sum(std::size_t at, Visit visit) const {
    visit(scratch_.dx + at * dx_stride(), scratch_.closed_dx + at * dx_stride(), spec_.head_dim);
    if (scratch_.dy == nullptr) return;
    visit(scratch_.dy + at * dy_stride(), scratch_.closed_dy + at * dy_stride(), spec_.head_dim_v);
  }

  // Adds the row's current split to those before it. The next tile begins another one.
  void close_split(std::size_t at) {
    const int flags = scratch_.flags[at];
    if ((flags & kHasOpen) == 0) return;
    for_each_sum(at, [&](float* current, float* closed, int dim) {
      const auto count = static_cast<std::size_t>(dim);
      if ((flags & kHasClosed) != 0) {
        add(current, count, closed);
      } else {
        std::copy_n(current, count, closed);
      }
      std::fill_n(current, count, 0.0F);
    });
    scratch_.flags[at] = kHasClosed;
  }

  float* state_of(int row, int head) const {
    const auto dims = static_cast<std::size_t>(spec_.head_dim + (scratch_.dy == nullptr ? 0 : spec_.head_dim_v));
    const std::int64_t index = scratch_.row[row] * all_heads_ + std::int64_t{kv_head_} * row_heads_ + head;
    return static_cast<float*>(task_.state) + static_cast<std::size_t>(index) * (1 + 2 * dims);
  }

  // Calls visit(state, stacked row) for each row and head.
  template <typename Visit>
  void for_each_state(Visit visit) const {
    for (int i = 0; i < rows_; ++i) {
      for (int h = 0; h < row_heads_; ++h) visit(state_of(i, h), stacked(i) + static_cast<std::size_t>(h));
    }
  }

  void load_state() {
    std::fill_n(scratch_.flags, stacked(rows_), 0);
    std::fill_n(scratch_.dx, stacked(rows_) * dx_stride(), 0.0F);
    if (scratch_.dy != nullptr) std::fill_n(scratch_.dy, stacked(rows_) * dy_stride(), 0.0F);
    if (!task_.resume) return;
    for_each_state([&](const float* state, std::size_t at) {
      const int flags = static_cast<int>(*state++);
      scratch_.flags[at] = flags;
      for_each_sum(at, [&](float* current, float*, int dim) {
        if ((flags & kHasOpen) != 0) std::copy_n(state, dim, current);
        state += dim;
      });
      for_each_sum(at, [&](float*, float* closed, int dim) {
        if ((flags & kHasClosed) != 0) std::copy_n(state, dim, closed);
        state += dim;
      });
    });
  }

  void save_state() const {
    for_each_state([&](float* state, std::size_t at) {
      const int flags = scratch_.flags[at];
      *state++ = static_cast<float>(flags);
      for_each_sum(at, [&](const float* current, const float*, int dim) {
        if ((flags & kHasOpen) != 0) std::copy_n(current, dim, state);
        state += dim;
      });
      for_each_sum(at, [&](const float*, const float* closed, int dim) {
        if ((flags & kHasClosed) != 0) std::copy_n(closed, dim, state);
        state += dim;
      });
    });
  }

  const BackwardTask& task_;
  std::int32_t sequence_;
};

class DqTile final : public GradientTile {
 public:
  DqTile(const AttentionBackwardSpec& spec, const BackwardOps& ops, const DqTask& task, const WorkTile& work_tile,
         int kv_head, GradientScratch& scratch)
      : GradientTile(spec, ops, task, task.rows[static_cast<std::size_t>(work_tile.run)].sequence, kv_head, scratch),
        task_(task) {
    row_heads_ = group_;
    all_heads_ = spec_.heads;
  }

 private:
  KeyRange columns_of_row(std::int64_t position) const override {
    return Visibility(spec_.mask, lengths_.k_len).keys(position);
  }
  TileRange tiles_of_columns(const KeyRange& columns) const override { return tiles_of(columns, kDqKeyTile); }
  TileColumns columns_of_tile(std::int64_t tile) const override {
    const std::int64_t first = tile * kDqKeyTile;
    return {{first, std::min(first + kDqKeyTile, lengths_.k_len)}, first % kBackwardKvSplit == 0};
  }

  void load_rows() override {
    for (int i = 0; i < rows_; ++i) {
      const std::int64_t row = scratch_.row[i];
      for (int h = 0; h < group_; ++h) {
        const std::size_t at = stacked(i) + static_cast<std::size_t>(h);
        ops_.widen(task_.q.at(row, head(h)), spec_.dtype, spec_.head_dim,
                   scratch_.x + at * static_cast<std::size_t>(spec_.head_dim));
        ops_.widen(task_.dout.at(row, head(h)), spec_.dtype, spec_.head_dim_v,
                   scratch_.y + at * static_cast<std::size_t>(spec_.head_dim_v));
        const float* const stats = task_.stats + (row * spec_.heads + head(h)) * kRowStats;
        scratch_.lse2[at] = stats[0];
        scratch_.delta[at] = stats[1];
      }
    }
  }

  void pack(const PageRun& at, int, int count) override {
    const BackwardKeySource& source = task_.sources[static_cast<std::size_t>(at.source)];
    ops_.pack(shape(), rows_from(source.k, at.row, kv_head_), rows_from(source.v, at.row, kv_head_), count,
              scratch_.tile);
  }

  void write(std::int64_t row, int head_of_group, std::size_t at) const override {
    write_gradient(scratch_.flags[at] == 0 ? scratch_.dx + at * dx_stride() : scratch_.closed_dx + at * dx_stride(),
                   spec_.head_dim, spec_.softmax_scale, gradients_, task_.dq->at(row, head(head_of_group)));
  }

  std::int64_t head(int head_of_group) const { return std::int64_t{kv_head_} * group_ + head_of_group; }

  const DqTask& task_;
};

class DkvTile final : public GradientTile {
 public:
  DkvTile(const AttentionBackwardSpec& spec, const BackwardOps& ops, const DkvTask& task, const WorkTile& work_tile,
          int kv_head, GradientScratch& scratch)
      : GradientTile(spec, ops, task, task.rows[static_cast<std::size_t>(work_tile.run)].sequence, kv_head, scratch),
        task_(task),
        split_(backward_query_split(spec.forward)) {
    tile_heads_ = group_;
    all_heads_ = spec_.kv_heads;
  }

 private:
  // Positions of the queries that see the key: it is at most `left` keys before and `right` keys after them.
  KeyRange columns_of_row(std::int64_t position) const override {
    const Mask& mask = spec_.mask;
    const std::int64_t begin = lengths_.q_offset;
    const std::int64_t end = begin + lengths_.q_len;
    return {mask.right < 0 ? begin : std::max(begin, position - mask.right),
            mask.left < 0 ? end : std::min(end, position + mask.left + 1)};
  }
  TileRange tiles_of_columns(const KeyRange& columns) const override {
    const std::int64_t first = first_query_tile(lengths_);
    return tiles_of(KeyRange{columns.begin - first, columns.end - first}, kBackwardTile);
  }
  TileColumns columns_of_tile(std::int64_t tile) const override {
    const std::int64_t first = first_query_tile(lengths_) + tile * kBackwardTile;
    return {{std::max(first, lengths_.q_offset), std::min(first + kBackwardTile, lengths_.q_offset + lengths_.q_len)},
            first % split_ == 0};
  }

  void load_rows() override {
    for (int i = 0; i < rows_; ++i) {
      const auto at = static_cast<std::size_t>(i);
      ops_.widen(task_.k.at(scratch_.row[i], kv_head_), spec_.dtype, spec_.head_dim,
                 scratch_.x + at * static_cast<std::size_t>(spec_.head_dim));
      ops_.widen(task_.v.at(scratch_.row[i], kv_head_), spec_.dtype, spec_.head_dim_v,
                 scratch_.y + at * static_cast<std::size_t>(spec_.head_dim_v));
    }
  }

  void pack(const PageRun& at, int head_of_group, int count) override {
    const BackwardQuerySource& source = task_.sources[static_cast<std::size_t>(at.source)];
    const std::int64_t head = std::int64_t{kv_head_} * group_ + head_of_group;
    ops_.pack(shape(), rows_from(source.q, at.row, head), rows_from(source.dout, at.row, head), count, scratch_.tile);
    const float* stats = source.stats + (at.row * spec_.heads + head) * kRowStats;
    for (int i = 0; i < count; ++i, stats += spec_.heads * kRowStats) {
      scratch_.tile.lse2[i] = stats[0];
      scratch_.tile.delta[i] = stats[1];
    }
    std::fill(scratch_.tile.lse2 + count, scratch_.tile.lse2 + kBackwardTile, 0.0F);
    std::fill(scratch_.tile.delta + count, scratch_.tile.delta + kBackwardTile, 0.0F);
  }

  void write(std::int64_t row, int, std::size_t at) const override {
    const bool none = scratch_.flags[at] == 0;
    write_gradient((none ? scratch_.dx : scratch_.closed_dx) + at * dx_stride(), spec_.head_dim, spec_.softmax_scale,
                   gradients_, task_.dk->at(row, kv_head_));
    write_gradient((none ? scratch_.dy : scratch_.closed_dy) + at * dy_stride(), spec_.head_dim_v, 1.0F, gradients_,
                   task_.dv->at(row, kv_head_));
  }

  const DkvTask& task_;
  std::int64_t split_;
};

// Takes arrays one after the other, each aligned to kVectorAlignment.
class Layout {
 public:
  explicit Layout(std::byte* base) : base_(base) {}

  template <typename T>
  void take(T*& array, std::size_t count) {
    if (base_ != nullptr) array = reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * sizeof(T) + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

// The arrays that both kernels have.
void take_common(const AttentionSpec& spec, const BackwardOps& ops, std::size_t rows, std::size_t heads, Layout& layout,
                 GradientScratch& scratch) {
  const std::size_t stacked = rows * heads;
  layout.take(scratch.x, stacked * static_cast<std::size_t>(spec.head_dim));
  layout.take(scratch.y, stacked * static_cast<std::size_t>(spec.head_dim_v));
  layout.take(scratch.dx, stacked * static_cast<std::size_t>(ops.row_stride(spec.head_dim)));
  layout.take(scratch.closed_dx, stacked * static_cast<std::size_t>(ops.row_stride(spec.head_dim)));
  layout.take(scratch.flags, stacked);
  layout.take(scratch.scores, static_cast<std::size_t>(ops.row_block) * kKeyTile);
  layout.take(scratch.dp, static_cast<std::size_t>(ops.row_block) * kKeyTile);
  layout.take(scratch.tile.m_transposed, ops.transposed_floats(spec.head_dim));
  layout.take(scratch.tile.n_transposed, ops.transposed_floats(spec.head_dim_v));
  layout.take(scratch.tile.m, ops.panel_floats(spec.head_dim));
  layout.take(scratch.visible, stacked);
  layout.take(scratch.row, rows);
  layout.take(scratch.columns, rows);
  layout.take(scratch.tiles, rows);
}

}  // namespace

std::size_t GradientScratch::layout_dq(const AttentionSpec& spec, const BackwardOps& ops, std::byte* base,
                                       GradientScratch& scratch) {
  Layout layout(base);
  const auto rows = static_cast<std::size_t>(max_dq_rows(spec));
  const auto heads = static_cast<std::size_t>(spec.heads / spec.kv_heads);
  take_common(spec, ops, rows, heads, layout, scratch);
  layout.take(scratch.lse2, rows * heads);
  layout.take(scratch.delta, rows * heads);
  return layout.bytes();
}

std::size_t GradientScratch::layout_dkv(const AttentionSpec& spec, const BackwardOps& ops, std::byte* base,
                                        GradientScratch& scratch) {
  Layout layout(base);
  constexpr std::size_t kRows = kDkvTileRows;
  take_common(spec, ops, kRows, 1, layout, scratch);
  layout.take(scratch.dy, kRows * static_cast<std::size_t>(ops.row_stride(spec.head_dim_v)));
  layout.take(scratch.closed_dy, kRows * static_cast<std::size_t>(ops.row_stride(spec.head_dim_v)));
  layout.take(scratch.tile.n, ops.panel_floats(spec.head_dim_v));
  layout.take(scratch.tile.lse2, kKeyTile);
  layout.take(scratch.tile.delta, kKeyTile);
  return layout.bytes();
}

void add_dq_tile(const AttentionBackwardSpec& spec, const BackwardOps& ops, const DqTask& task,
                 const WorkTile& work_tile, int kv_head, GradientScratch& scratch, const Checkpoint& checkpoint) {
  DqTile(spec, ops, task, work_tile, kv_head, scratch).run(work_tile, task.dq != nullptr, checkpoint);
}

void add_dkv_tile(const AttentionBackwardSpec& spec, const BackwardOps& ops, const DkvTask& task,
                  const WorkTile& work_tile, int kv_head, GradientScratch& scratch, const Checkpoint& checkpoint) {
  DkvTile(spec, ops, task, work_tile, kv_head, scratch).run(work_tile, task.dk != nullptr, checkpoint);
}

}  // namespace ringattn::cpu
