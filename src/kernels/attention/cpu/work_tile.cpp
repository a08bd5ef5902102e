// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/cpu/work_tile.hpp"

#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/attention/cpu/attention_state.hpp"

namespace ringattn::cpu {

namespace {

// Consecutive key tiles that a work tile processes: their indices, the first one's ordinal in the mask row, which gives
// its KV split, and its index in AttentionTask::tiles.
struct TileRun {
  TileRange tiles;
  std::int64_t ordinal;
  std::int64_t table;
};

TileShape shape_of(const AttentionSpec& spec) {
  return {spec.dtype, spec.head_dim, spec.head_dim_v, spec.softmax_scale, spec.softcap};
}

// Packs the first `keys` keys of tile `index` of the task.
void pack_tile(const AttentionSpec& spec, const TileOps& ops, const AttentionTask& task, int kv_head,
               std::int64_t index, int keys, PackedTile& tile) {
  const PageRun* const page_runs = task.tiles.data() + index * task.page_runs;
  const KeySource& source = task.sources[static_cast<std::size_t>(page_runs->source)];
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  const int page_run_log2 = std::countr_zero(static_cast<unsigned>(kKeyTile / task.page_runs));
  TileRows k{{}, source.k.token_stride * element, page_run_log2};
  TileRows v{{}, source.v.token_stride * element, page_run_log2};
  for (int i = 0; i << page_run_log2 < keys; ++i) {
    k.page_runs[i] = source.k_at(page_runs[i].row, kv_head);
    v.page_runs[i] = source.v_at(page_runs[i].row, kv_head);
  }
  ops.pack(shape_of(spec), k, v, keys, tile);
}

constexpr int kOutputRowsAhead = 6;  // finish() prefetches this many rows ahead

// One head work tile during a task.
class WorkTileAttention {
 public:
  WorkTileAttention(const AttentionSpec& spec, const TileOps& ops, const AttentionTask& task, const WorkTile& work_tile,
                    int head, const SharedTiles& shared, TileScratch& scratch)
      : spec_(spec),
        ops_(ops),
        task_(task),
        shared_(shared),
        scratch_(scratch),
        first_head_(head),
        kv_head_(head / (spec.heads / spec.kv_heads)),
        rows_(static_cast<int>(work_tile.rows)),
        ratio_(heads_of_tile(spec)),
        q_stride_(static_cast<std::size_t>(ops.q_stride(spec.head_dim))),
        o_stride_(static_cast<std::size_t>(ops.o_stride(spec.head_dim_v))),
        sequence_(task.queries[static_cast<std::size_t>(work_tile.run)].sequence),
        key_length_(task.key_lengths[static_cast<std::size_t>(sequence_)]),
        first_position_(task.queries[static_cast<std::size_t>(work_tile.run)].position + work_tile.offset) {
    for_each_query_run(task.queries, work_tile,
                       [&](std::int64_t first, std::int64_t count, const QueryRun& run, std::int64_t offset) {
                         for (std::int64_t i = 0; i < count; ++i) {
                           const std::int64_t position = run.position + offset + i;
                           scratch_.row[first + i] = run.row + offset + i;
                           scratch_.keys[first + i] = keys_of(position);
                           scratch_.key_tiles[first + i] = tiles_of(scratch_.keys[first + i], kKeyTile);
                         }
                       });
    find_tile_runs();
  }

  std::span<const TileRun> tile_runs() const { return tile_runs_; }

  void load_queries() {
    for (int i = 0; i < rows_; ++i) {
      for (int h = 0; h < ratio_; ++h) {
        ops_.load_query(task_.q.at(scratch_.row[i], head(h)), spec_.dtype, spec_.head_dim,
                        scratch_.q + index(i, h) * q_stride_);
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

  // Attends the rows that see a key of the tile to it. They are consecutive, because the ends of their ranges ascend,
  // except for rows between them that see no key of the sequence, if key positions have gaps.
  void attend_tile(const TileRun& tile_run, std::int64_t tile) {
    const auto sees = [&](const TileRange& range) { return range.begin <= tile && tile < range.end; };
    const TileRange* ranges = scratch_.key_tiles;
    const std::int64_t nth = tile - tile_run.tiles.begin;
    const auto keys = static_cast<int>(std::min<std::int64_t>(kKeyTile, key_length_ - tile * kKeyTile));
    const TileShape shape = shape_of(spec_);
    PackedTile packed;
    PackedTile next;
    bool has_next = shared_.find(kv_head_, tile_run.table + nth + 1, next);
    for (int last = 0; last < rows_;) {
      const auto first = static_cast<int>(std::find_if(ranges + last, ranges + rows_, sees) - ranges);
      last = static_cast<int>(std::find_if_not(ranges + first, ranges + rows_, sees) - ranges);
      if (first == last) return;
      if (packed.k == nullptr && !shared_.find(kv_head_, tile_run.table + nth, packed)) {
        pack_tile(spec_, ops_, task_, kv_head_, tile_run.table + nth, keys, scratch_.tile);
        packed = scratch_.tile;
      }
      attend_rows(shape, tile, first, last, (tile_run.ordinal + nth) % kTilesPerKvSplit == 0, packed,
                  has_next ? &next : nullptr);
      has_next = false;
    }
  }

  // Attends rows [first, last), which all see a key of the packed tile.
  void attend_rows(const TileShape& shape, std::int64_t tile, int first, int last, bool begins_split,
                   const PackedTile& packed, const PackedTile* next) {
    // Rows process tiles in order of their ordinals, so the current partial belongs to an earlier split when a split
    // begins.
    if (begins_split) merge_current_splits(index(first, 0), index(last, 0));
    for (std::size_t at = index(first, 0); at < index(last, 0); ++at) scratch_.flags[at] |= kHasCurrent;
    for (int i = first; i < last; ++i) {
      std::fill_n(scratch_.visible + index(i, 0), ratio_, columns_of(scratch_.keys[i], tile * kKeyTile, kKeyTile));
    }
    const std::size_t start = index(first, 0);
    const RowBatch batch{scratch_.q + start * q_stride_,
                         scratch_.offset + start,
                         scratch_.sum + start,
                         scratch_.acc + start * o_stride_,
                         scratch_.visible + start,
                         (last - first) * ratio_,
                         next};
    ops_.attend(shape, packed, batch, scratch_.scores);
  }

  void save_state() const {
    for (int i = 0; i < rows_; ++i) {
      for (int h = 0; h < ratio_; ++h) write_state(spec_, attention_state(index(i, h)), state_of(i, h));
    }
  }

  void finish() const {
    const AttentionOutput& output = *task_.finish;
    for (int i = 0; i < rows_; ++i) {
      if (i + kOutputRowsAhead < rows_) prefetch_output(output, scratch_.row[i + kOutputRowsAhead]);
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

  // Finds the tiles that some row processes, among those of the task and, with a block mask, of the mask row.
  void find_tile_runs() {
    TileRange seen{std::numeric_limits<std::int64_t>::max(), 0};
    for (int i = 0; i < rows_; ++i) {
      const TileRange& row = scratch_.key_tiles[i];
      if (row.empty()) continue;
      seen = {std::min(seen.begin, row.begin), std::max(seen.end, row.end)};
    }
    const auto runs = std::equal_range(task_.key_runs.begin(), task_.key_runs.end(), KeyRun{sequence_, 0, 0, 0},
                                       [](const KeyRun& a, const KeyRun& b) { return a.sequence < b.sequence; });
    const auto end = runs.second;
    const auto add = [&](const TileRange& tiles, std::int64_t ordinal, const KeyRun& run) {
      const TileRange both{std::max({seen.begin, tiles.begin, run.first_tile}),
                           std::min({seen.end, tiles.end, run.first_tile + run.tiles})};
      if (both.empty()) return;
      tile_runs_.push_back({both, ordinal + both.begin - tiles.begin, run.table + both.begin - run.first_tile});
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
                             query_block_of(first_position_, shape.query_block), [&](const MaskedTileRun& masked) {
                               while (run != end && run->first_tile + run->tiles <= masked.tiles.begin) ++run;
                               for (auto next = run; next != end && next->first_tile < masked.tiles.end; ++next) {
                                 add(masked.tiles, masked.ordinal, *next);
                               }
                             });
  }

  // Rows are ordered token by token, so that rows that see the same keys are adjacent.
  std::size_t index(int row, int head_of_tile) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(ratio_) + static_cast<std::size_t>(head_of_tile);
  }
  std::int64_t head(int head_of_tile) const { return std::int64_t{first_head_} + head_of_tile; }
  // Requests the cache lines of a row. Output rows lie a page apart and stores retire in order, so without it each
  // store would wait for its cache line. Always inlined: g++ 12 drops calls of a function that only prefetches.
  [[gnu::always_inline]] void prefetch_output(const AttentionOutput& output, std::int64_t row) const {
    constexpr std::size_t kLine = 64;
    const std::size_t bytes = static_cast<std::size_t>(spec_.head_dim_v) * size_of(spec_.dtype);
    for (int h = 0; h < ratio_; ++h) {
      const std::byte* const out = output.out.at(row, head(h));
      for (std::size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(out + at, /*rw=*/1);
    }
  }
  float* state_of(int row, int head_of_tile) const {
    return state_at(spec_, static_cast<float*>(task_.state), scratch_.row[row], head(head_of_tile));
  }

  AttentionState attention_state(std::size_t at) const {
    return {scratch_.flags[at],
            {scratch_.offset[at], scratch_.sum[at], scratch_.acc + at * o_stride_},
            {scratch_.merged_offset[at], scratch_.merged_sum[at], scratch_.merged_acc + at * o_stride_}};
  }
  // Resets to the identity, from which a KV split begins.
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
  const SharedTiles& shared_;
  TileScratch& scratch_;
  int first_head_;
  int kv_head_;
  int rows_;
  int ratio_;
  std::size_t q_stride_;
  std::size_t o_stride_;
  std::int32_t sequence_;
  std::int64_t key_length_;
  std::int64_t first_position_;
  std::vector<TileRun> tile_runs_;
};

}  // namespace

std::vector<WorkTile> make_work_tiles(std::span<const QueryRun> queries, std::int64_t rows,
                                      const BlockMaskShape& block_mask) {
  std::vector<WorkTile> work_tiles;
  // Two passes: the first one counts, so that the vector allocates exactly what it needs.
  for (const bool count : {true, false}) {
    std::size_t made = 0;
    std::int64_t capacity_left = 0;  // rows that the last work tile can still take
    std::int32_t sequence = -1;
    std::int64_t block = 0;  // query block of the last work tile's rows, with a block mask
    for (std::size_t run = 0; run < queries.size(); ++run) {
      if (queries[run].sequence != sequence) capacity_left = 0;
      sequence = queries[run].sequence;
      for (std::int64_t offset = 0; offset < queries[run].rows;) {
        std::int64_t max_rows = queries[run].rows - offset;
        if (block_mask.any()) {
          const std::int64_t position = queries[run].position + offset;
          const std::int64_t own = query_block_of(position, block_mask.query_block);
          if (own != block) capacity_left = 0;
          block = own;
          max_rows = std::min(max_rows, (own + 1) * block_mask.query_block - position);
        }
        if (capacity_left == 0) {
          if (!count) work_tiles.push_back({static_cast<std::int64_t>(run), offset, 0});
          ++made;
          capacity_left = rows;
        }
        const std::int64_t taken = std::min(capacity_left, max_rows);
        if (!count) work_tiles.back().rows += taken;
        capacity_left -= taken;
        offset += taken;
      }
    }
    if (count) work_tiles.reserve(made);
  }
  return work_tiles;
}

std::size_t TileScratch::layout(const AttentionSpec& spec, const TileOps& ops, std::byte* base, TileScratch& scratch) {
  std::size_t bytes = 0;
  const auto take = [&]<typename T>(T*& array, std::size_t count) {
    if (base != nullptr) array = reinterpret_cast<T*>(base + bytes);
    bytes += (count * sizeof(T) + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment;
  };
  const auto rows = static_cast<std::size_t>(max_tile_rows(spec, ops));
  const std::size_t stacked = rows * static_cast<std::size_t>(spec.heads / spec.kv_heads);
  take(scratch.q, stacked * static_cast<std::size_t>(ops.q_stride(spec.head_dim)));
  take(scratch.acc, stacked * static_cast<std::size_t>(ops.o_stride(spec.head_dim_v)));
  take(scratch.offset, stacked);
  take(scratch.sum, stacked);
  take(scratch.merged_acc, stacked * static_cast<std::size_t>(ops.o_stride(spec.head_dim_v)));
  take(scratch.merged_offset, stacked);
  take(scratch.merged_sum, stacked);
  take(scratch.flags, stacked);
  take(scratch.scores, ops.score_floats);
  take(scratch.tile.k, ops.k_floats(spec.head_dim));
  take(scratch.tile.v, ops.v_floats(spec.head_dim_v));
  take(scratch.visible, stacked);
  take(scratch.row, rows);
  take(scratch.keys, rows);
  take(scratch.key_tiles, rows);
  return bytes;
}

void SharedTiles::pack(const AttentionTask& task, std::int64_t item) const {
  const std::int64_t table = item / heads_;
  const std::int64_t slot = item % heads_ * tiles_ + table;
  const auto run = std::find_if(task.key_runs.begin(), task.key_runs.end(), [&](const KeyRun& key_run) {
    return key_run.table <= table && table < key_run.table + key_run.tiles;
  });
  PackedTile tile = view(slot);
  tile.v_finite = false;
  if (run != task.key_runs.end()) {
    const std::int64_t first_key = (run->first_tile + table - run->table) * kKeyTile;
    const std::int64_t length = task.key_lengths[static_cast<std::size_t>(run->sequence)];
    const auto keys = static_cast<int>(std::min<std::int64_t>(kKeyTile, length - first_key));
    pack_tile(*spec_, *ops_, task, first_head_ + static_cast<int>(slot / tiles_), table, keys, tile);
  }
  *finite(slot) = tile.v_finite ? 1 : 0;
}

bool SharedTiles::find(int head, std::int64_t table, PackedTile& tile) const {
  if (head < first_head_ || head >= first_head_ + heads_ || table >= tiles_) return false;
  const std::int64_t slot = (head - first_head_) * tiles_ + table;
  if (*finite(slot) == 0) return false;
  tile = view(slot);
  return true;
}

void attend_work_tile(const AttentionSpec& spec, const TileOps& ops, const AttentionTask& task,
                      const WorkTile& work_tile, int head, const SharedTiles& shared, TileScratch& scratch,
                      const Checkpoint& checkpoint) {
  WorkTileAttention attention(spec, ops, task, work_tile, head, shared, scratch);
  const bool sees = !attention.tile_runs().empty();
  const bool nothing_changes = task.resume && !sees;
  if (nothing_changes && task.finish == nullptr) return;

  attention.load_state();
  if (sees) {
    attention.load_queries();
    for (const TileRun& tile_run : attention.tile_runs()) {
      for (std::int64_t tile = tile_run.tiles.begin; tile < tile_run.tiles.end; ++tile) {
        if (checkpoint.should_stop()) return;
        attention.attend_tile(tile_run, tile);
      }
    }
  }
  if (task.save && !nothing_changes) attention.save_state();
  if (task.finish != nullptr) attention.finish();
}

}  // namespace ringattn::cpu
