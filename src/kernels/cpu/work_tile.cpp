// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/work_tile.hpp"

#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/cpu/attention_state.hpp"

namespace ringattn::cpu {

namespace {

// Calls visit(first, count, run, offset) for each piece of a group: rows [offset, offset + count) of a query run, that
// are the group's rows first, first + 1, ….
template <typename Visit>
void for_each_page_run(std::span<const QueryRun> queries, const WorkTile& group, Visit visit) {
  std::int64_t done = 0;
  std::int64_t offset = group.offset;
  for (auto run = static_cast<std::size_t>(group.run); done < group.rows; ++run, offset = 0) {
    const std::int64_t count = std::min(group.rows - done, queries[run].rows - offset);
    visit(done, count, queries[run], offset);
    done += count;
  }
}

// Consecutive tiles that a group folds: their numbers, the place of the first one in its row's order of tiles, which
// says to which group of tiles it belongs, and its entry in the map of tiles.
struct Stretch {
  TileRange tiles;
  std::int64_t place;
  std::int64_t table;
};

// One group of rows and its heads on their way through a task.
class WorkTileAttention {
 public:
  WorkTileAttention(const AttentionSpec& spec, const TileOps& ops, const AttentionTask& task, const WorkTile& group,
                    int head, TileScratch& scratch)
      : spec_(spec),
        ops_(ops),
        task_(task),
        scratch_(scratch),
        first_head_(head),
        kv_head_(head / (spec.heads / spec.kv_heads)),
        rows_(static_cast<int>(group.rows)),
        ratio_(heads_of_tile(spec)),
        o_stride_(static_cast<std::size_t>(ops.o_stride(spec.head_dim_v))),
        sequence_(task.queries[static_cast<std::size_t>(group.run)].sequence),
        key_length_(task.key_lengths[static_cast<std::size_t>(sequence_)]),
        first_position_(task.queries[static_cast<std::size_t>(group.run)].position + group.offset) {
    for_each_page_run(task.queries, group,
                      [&](std::int64_t first, std::int64_t count, const QueryRun& run, std::int64_t offset) {
                        for (std::int64_t i = 0; i < count; ++i) {
                          const std::int64_t position = run.position + offset + i;
                          scratch_.row[first + i] = run.row + offset + i;
                          scratch_.keys[first + i] = keys_of(position);
                          scratch_.key_tiles[first + i] = tiles_of(scratch_.keys[first + i], kKeyTile);
                        }
                      });
    find_stretches();
  }

  std::span<const Stretch> stretches() const { return stretches_; }

  void load_queries() {
    for (int i = 0; i < rows_; ++i) {
      for (int h = 0; h < ratio_; ++h) {
        ops_.widen(task_.q.at(scratch_.row[i], head(h)), spec_.dtype, spec_.head_dim,
                   scratch_.q + index(i, h) * static_cast<std::size_t>(spec_.head_dim));
      }
    }
  }

  void load_state() {
    for (std::size_t at = 0; at < index(rows_, 0); ++at) {
      scratch_.flags[at] = 0;
      clear_current(at);
    }
    if (!task_.resume) return;
    for (int i = 0; i < rows_; ++i) {
      for (int h = 0; h < ratio_; ++h) {
        const std::size_t at = index(i, h);
        const AttentionState saved = read_state(spec_, state_of(i, h));
        scratch_.flags[at] = saved.flags;
        if ((saved.flags & kHasCurrent) != 0) {
          scratch_.offset[at] = saved.current.offset;
          scratch_.sum[at] = saved.current.sum;
          std::copy_n(saved.current.acc, spec_.head_dim_v, scratch_.acc + at * o_stride_);
        }
        if ((saved.flags & kHasMerged) != 0) {
          scratch_.merged_offset[at] = saved.merged.offset;
          scratch_.merged_sum[at] = saved.merged.sum;
          std::copy_n(saved.merged.acc, spec_.head_dim_v, scratch_.merged_acc + at * o_stride_);
        }
      }
    }
  }

  // Folds one tile into the rows that see a key of it: neighbours, as the ends of their ranges ascend, but for rows
  // between them that see none of the sequence's keys, where these stand far apart.
  void attend_tile(const Stretch& stretch, std::int64_t tile) {
    const auto folds = [&](const TileRange& range) { return range.begin <= tile && tile < range.end; };
    const TileRange* ranges = scratch_.key_tiles;
    const std::int64_t nth = tile - stretch.tiles.begin;
    const auto keys = static_cast<int>(std::min<std::int64_t>(kKeyTile, key_length_ - tile * kKeyTile));
    const TileShape shape{spec_.dtype, spec_.head_dim, spec_.head_dim_v, spec_.softmax_scale, spec_.softcap};
    bool packed = false;
    for (int last = 0; last < rows_;) {
      const auto first = static_cast<int>(std::find_if(ranges + last, ranges + rows_, folds) - ranges);
      last = static_cast<int>(std::find_if_not(ranges + first, ranges + rows_, folds) - ranges);
      if (first == last) return;
      if (!packed) {
        const TilePageRuns place = find_tile(stretch.table + nth, keys);
        ops_.pack(shape, place.k, place.v, keys, scratch_.tile);
        packed = true;
      }
      attend_rows(shape, tile, first, last, (stretch.place + nth) % kTilesPerKvSplit == 0);
    }
  }

  // Folds the packed tile into rows [first, last), which all see a key of it.
  void attend_rows(const TileShape& shape, std::int64_t tile, int first, int last, bool begins_split) {
    // Rows fold tiles at consecutive places, so what is open when a group begins is another's.
    if (begins_split) merge_current_splits(index(first, 0), index(last, 0));
    for (std::size_t at = index(first, 0); at < index(last, 0); ++at) scratch_.flags[at] |= kHasCurrent;
    for (int i = first; i < last; ++i) {
      std::fill_n(scratch_.visible + index(i, 0), ratio_, columns_of(scratch_.keys[i], tile * kKeyTile, kKeyTile));
    }
    const std::size_t start = index(first, 0);
    const RowBatch batch{scratch_.q + start * static_cast<std::size_t>(spec_.head_dim),
                         scratch_.offset + start,
                         scratch_.sum + start,
                         scratch_.acc + start * o_stride_,
                         scratch_.visible + start,
                         (last - first) * ratio_};
    ops_.attend(shape, scratch_.tile, batch, scratch_.scores);
  }

  void save_state() const {
    for (int i = 0; i < rows_; ++i) {
      for (int h = 0; h < ratio_; ++h) write_state(spec_, attention_state(index(i, h)), state_of(i, h));
    }
  }

  void finish() const {
    const AttentionOutput& output = *task_.finish;
    for (int i = 0; i < rows_; ++i) {
      const std::int64_t row = scratch_.row[i];
      for (int h = 0; h < ratio_; ++h) {
        const float* sink = spec_.sinks ? output.sinks + head(h) : nullptr;
        AttentionState state = attention_state(index(i, h));
        const float lse = finish_row(spec_, merge_all(spec_, ops_, state), sink, output.out.at(row, head(h)));
        if (output.lse.data != nullptr) output.lse.at(row, head(h)) = lse;
      }
    }
  }

 private:
  // The keys that the row at `position` sees.
  KeyRange keys_of(std::int64_t position) const {
    if (task_.positions == nullptr) return Visibility(spec_.mask, key_length_).keys(position);
    const auto own = positions_of(task_.positions, static_cast<std::size_t>(sequence_), kv_head_);
    return PositionedVisibility(spec_.mask, own).keys(position);
  }

  // What some row folds of the tiles that the task has and, where there are block_mask, that are listed.
  void find_stretches() {
    TileRange seen{std::numeric_limits<std::int64_t>::max(), 0};
    for (int i = 0; i < rows_; ++i) {
      const TileRange& row = scratch_.key_tiles[i];
      if (row.empty()) continue;
      seen = {std::min(seen.begin, row.begin), std::max(seen.end, row.end)};
    }
    const auto runs = std::equal_range(task_.key_runs.begin(), task_.key_runs.end(), KeyRun{sequence_, 0, 0, 0},
                                       [](const KeyRun& a, const KeyRun& b) { return a.sequence < b.sequence; });
    const auto end = runs.second;
    const auto add = [&](const TileRange& tiles, std::int64_t place, const KeyRun& run) {
      const TileRange both{std::max({seen.begin, tiles.begin, run.first_tile}),
                           std::min({seen.end, tiles.end, run.first_tile + run.tiles})};
      if (both.empty()) return;
      stretches_.push_back({both, place + both.begin - tiles.begin, run.table + both.begin - run.first_tile});
    };
    if (task_.block_mask == nullptr) {
      for (auto run = runs.first; run != end; ++run) {
        add({run->first_tile, run->first_tile + run->tiles}, run->first_tile, *run);
      }
      return;
    }
    const BlockMaskShape& shape = task_.block_mask->shape();
    auto run = runs.first;
    for_each_masked_tile_run(*task_.block_mask, spec_.mask, kKeyTile, static_cast<std::size_t>(sequence_),
                             mask_head(shape, spec_.heads, first_head_),
                             query_block_of(first_position_, shape.query_block), [&](const MaskedTileRun& listed) {
                               while (run != end && run->first_tile + run->tiles <= listed.tiles.begin) ++run;
                               for (auto next = run; next != end && next->first_tile < listed.tiles.end; ++next) {
                                 add(listed.tiles, listed.place, *next);
                               }
                             });
  }

  // Rows are stacked token by token, so that rows which see the same keys are neighbours.
  std::size_t index(int row, int head_of_tile) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(ratio_) + static_cast<std::size_t>(head_of_tile);
  }
  // Where the first `keys` keys of a tile of the map lie.
  struct TilePageRuns {
    TileRows k;
    TileRows v;
  };
  TilePageRuns find_tile(std::int64_t index, int keys) const {
    const PageRun* const pieces = task_.tiles.data() + index * task_.page_runs;
    const KeySource& source = task_.sources[static_cast<std::size_t>(pieces->source)];
    const auto element = static_cast<std::int64_t>(size_of(spec_.dtype));
    const int page_run_log2 = std::countr_zero(static_cast<unsigned>(kKeyTile / task_.page_runs));
    TilePageRuns place{{{}, source.k.token_stride * element, page_run_log2},
                       {{}, source.v.token_stride * element, page_run_log2}};
    for (int i = 0; i << page_run_log2 < keys; ++i) {
      place.k.page_runs[i] = source.k_at(pieces[i].row, kv_head_);
      place.v.page_runs[i] = source.v_at(pieces[i].row, kv_head_);
    }
    return place;
  }
  std::int64_t head(int head_of_tile) const { return std::int64_t{first_head_} + head_of_tile; }
  float* state_of(int row, int head_of_tile) const {
    return state_at(spec_, static_cast<float*>(task_.state), scratch_.row[row], head(head_of_tile));
  }

  AttentionState attention_state(std::size_t at) const {
    return {scratch_.flags[at],
            {scratch_.offset[at], scratch_.sum[at], scratch_.acc + at * o_stride_},
            {scratch_.merged_offset[at], scratch_.merged_sum[at], scratch_.merged_acc + at * o_stride_}};
  }
  // The identity, from which a group begins.
  void clear_current(std::size_t at) {
    scratch_.offset[at] = -std::numeric_limits<float>::infinity();
    scratch_.sum[at] = 0.0F;
    std::fill_n(scratch_.acc + at * o_stride_, o_stride_, 0.0F);
  }
  void merge_current_splits(std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < end; ++at) {
      if ((scratch_.flags[at] & kHasCurrent) == 0) continue;
      AttentionState row = attention_state(at);
      merge_current(spec_, ops_, row);
      scratch_.flags[at] = row.flags;
      scratch_.merged_offset[at] = row.merged.offset;
      scratch_.merged_sum[at] = row.merged.sum;
      clear_current(at);
    }
  }

  const AttentionSpec& spec_;
  const TileOps& ops_;
  const AttentionTask& task_;
  TileScratch& scratch_;
  int first_head_;
  int kv_head_;
  int rows_;
  int ratio_;
  std::size_t o_stride_;
  std::int32_t sequence_;
  std::int64_t key_length_;
  std::int64_t first_position_;
  std::vector<Stretch> stretches_;
};

}  // namespace

std::vector<WorkTile> make_work_tiles(std::span<const QueryRun> queries, std::int64_t rows,
                                      const BlockMaskShape& block_mask) {
  std::vector<WorkTile> groups;
  // Twice the same walk: the first counts, so that the list takes the memory it needs and no more.
  for (const bool count : {true, false}) {
    std::size_t made = 0;
    std::int64_t capacity_left = 0;  // rows that the last group can still take
    std::int32_t sequence = -1;
    std::int64_t block = 0;  // that the last group's rows lie in, where there are lists
    for (std::size_t run = 0; run < queries.size(); ++run) {
      if (queries[run].sequence != sequence) capacity_left = 0;
      sequence = queries[run].sequence;
      for (std::int64_t offset = 0; offset < queries[run].rows;) {
        std::int64_t most = queries[run].rows - offset;
        if (block_mask.any()) {
          const std::int64_t position = queries[run].position + offset;
          const std::int64_t own = query_block_of(position, block_mask.query_block);
          if (own != block) capacity_left = 0;
          block = own;
          most = std::min(most, (own + 1) * block_mask.query_block - position);
        }
        if (capacity_left == 0) {
          if (!count) groups.push_back({static_cast<std::int64_t>(run), offset, 0});
          ++made;
          capacity_left = rows;
        }
        const std::int64_t taken = std::min(capacity_left, most);
        if (!count) groups.back().rows += taken;
        capacity_left -= taken;
        offset += taken;
      }
    }
    if (count) groups.reserve(made);
  }
  return groups;
}

std::size_t TileScratch::layout(const AttentionSpec& spec, const TileOps& ops, std::byte* base, TileScratch& scratch) {
  std::size_t bytes = 0;
  const auto take = [&]<typename T>(T*& array, std::size_t count) {
    if (base != nullptr) array = reinterpret_cast<T*>(base + bytes);
    bytes += (count * sizeof(T) + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment;
  };
  const auto rows = static_cast<std::size_t>(max_tile_rows(spec));
  const std::size_t stacked = rows * static_cast<std::size_t>(spec.heads / spec.kv_heads);
  take(scratch.q, stacked * static_cast<std::size_t>(spec.head_dim));
  take(scratch.acc, stacked * static_cast<std::size_t>(ops.o_stride(spec.head_dim_v)));
  take(scratch.offset, stacked);
  take(scratch.sum, stacked);
  take(scratch.merged_acc, stacked * static_cast<std::size_t>(ops.o_stride(spec.head_dim_v)));
  take(scratch.merged_offset, stacked);
  take(scratch.merged_sum, stacked);
  take(scratch.flags, stacked);
  take(scratch.scores, static_cast<std::size_t>(ops.row_block) * kKeyTile);
  take(scratch.tile.k, ops.k_floats(spec.head_dim));
  take(scratch.tile.v, ops.v_floats(spec.head_dim_v));
  take(scratch.visible, stacked);
  take(scratch.row, rows);
  take(scratch.keys, rows);
  take(scratch.key_tiles, rows);
  return bytes;
}

void attend_work_tile(const AttentionSpec& spec, const TileOps& ops, const AttentionTask& task, const WorkTile& group,
                      int head, TileScratch& scratch, const Checkpoint& checkpoint) {
  WorkTileAttention attention(spec, ops, task, group, head, scratch);
  const bool folds = !attention.stretches().empty();
  const bool nothing_changes = task.resume && !folds;
  if (nothing_changes && task.finish == nullptr) return;

  attention.load_state();
  if (folds) {
    attention.load_queries();
    for (const Stretch& stretch : attention.stretches()) {
      for (std::int64_t tile = stretch.tiles.begin; tile < stretch.tiles.end; ++tile) {
        if (checkpoint.should_stop()) return;
        attention.attend_tile(stretch, tile);
      }
    }
  }
  if (task.save && !nothing_changes) attention.save_state();
  if (task.finish != nullptr) attention.finish();
}

}  // namespace ringattn::cpu
