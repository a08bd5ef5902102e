// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/cuda/backward_tables.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "kernels/attention/visibility.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::size_t kTableAlignment = 16;
// CTAs may wait for the last one for 1/kTolerableWait of their work before splits are shared among them.
constexpr std::int64_t kTolerableWait = 16;

std::size_t align_table(std::size_t bytes) { return (bytes + kTableAlignment - 1) / kTableAlignment * kTableAlignment; }

BackwardTableLayout layout_of(std::size_t pairs, std::size_t row_tiles, std::size_t runs, std::size_t tiles,
                              std::size_t tile_rows, std::size_t merged, std::size_t ds) {
  BackwardTableLayout layout;
  layout.pairs = align_table(kBackwardCounters * sizeof(std::int32_t));
  layout.row_tiles = layout.pairs + align_table(pairs * sizeof(RowTilePair));
  layout.runs = layout.row_tiles + align_table(row_tiles * sizeof(RowTile));
  layout.tiles = layout.runs + align_table(runs * sizeof(TileRun));
  layout.tile_rows = layout.tiles + align_table(tiles * sizeof(OtherTile));
  layout.merged = layout.tile_rows + align_table(tile_rows * sizeof(TileRows));
  layout.ds = layout.merged + align_table(merged * sizeof(MergedHeadTile));
  layout.bytes = layout.ds + align_table(ds * sizeof(DsOfKeys));
  return layout;
}

std::int32_t narrow(std::int64_t position) {
  if (position <= -kMaxBackwardPosition || position >= kMaxBackwardPosition) {
    fail(ErrorCode::kUnsupported, fmt::format("the backward pass of attention reads position {}", position),
         fmt::format("its kernel supports positions within ±{}", kMaxBackwardPosition), "Use shorter sequences.");
  }
  return static_cast<std::int32_t>(position);
}

// The largest divisor of the KV heads whose other side fits into the L2 swizzle group's bytes.
std::int32_t swizzle_heads_of(int kv_heads, std::int64_t head_bytes, std::int64_t swizzle_bytes) {
  int heads = kv_heads;
  while (heads > 1 && (kv_heads % heads != 0 || heads * head_bytes > swizzle_bytes)) --heads;
  return heads;
}

}  // namespace

// A sequence seen from the rows: positions are counted from the other side's tile 0.
struct BackwardTableBuilder::Sequence {
  std::int64_t origin;                  // key position of the other side's tile 0
  std::int64_t row_begin, row_end;      // rows of the sequence
  std::int64_t other_begin, other_end;  // rows of the other side
  std::int32_t run_begin, run_end;      // in runs_
  std::int32_t split_phase;
  std::int32_t tiles_per_split;
};

std::size_t row_tile_limit(const BackwardLimits& limits) {
  // a run's first and last tile may be partial
  return static_cast<std::size_t>(limits.rows / kBackwardTile + 2 * limits.row_runs);
}

std::size_t backward_table_bytes(const BackwardLimits& limits, int group, std::int64_t partials) {
  const std::size_t row_tiles = row_tile_limit(limits);
  const auto extra = static_cast<std::size_t>(partials);
  return layout_of(
             row_tiles * static_cast<std::size_t>(group) + extra, row_tiles, static_cast<std::size_t>(limits.tile_runs),
             static_cast<std::size_t>(limits.tiles), static_cast<std::size_t>(limits.tiles), kRowTilesOfPair * extra,
             limits.sharing != ScoreSharing::kNever ? kDsTilesOfKeyTile * static_cast<std::size_t>(limits.tiles) : 0)
      .bytes;
}

void BackwardTableBuilder::reserve(const BackwardLimits& limits, int group, std::int64_t partials) {
  runs_.reserve(static_cast<std::size_t>(limits.tile_runs));
  tiles_.reserve(static_cast<std::size_t>(limits.tiles));
  row_tiles_.reserve(row_tile_limit(limits));
  pairs_.reserve(row_tile_limit(limits) * static_cast<std::size_t>(group) + static_cast<std::size_t>(partials));
  merged_.reserve(kRowTilesOfPair * static_cast<std::size_t>(partials));
  placed_ds_.reserve(row_tile_limit(limits));
  if (limits.sharing != ScoreSharing::kNever) ds_.reserve(kDsTilesOfKeyTile * static_cast<std::size_t>(limits.tiles));
}

BackwardTableLayout BackwardTableBuilder::build(const AttentionSpec& spec, const BackwardTask& task,
                                                const BackwardShape& shape, bool finish, const BackwardSources& sources,
                                                std::span<std::byte> memory) {
  runs_.clear();
  row_tiles_.clear();
  pairs_.clear();
  merged_.clear();
  for (const KeyRun& run : task.runs) {
    runs_.push_back(
        {narrow(run.first_tile), static_cast<std::int32_t>(run.tiles), static_cast<std::int32_t>(run.table)});
  }
  add_tiles(task, shape, sources);
  ds_.clear();
  ds_tiles_ = 0;
  const bool of_queries = shape.rows == BackwardSide::kQueries;
  if (of_queries && shape.spills) find_ds(task);
  if (!of_queries) placed_ds_.clear();
  const Mask mask = of_queries ? spec.mask : Mask{spec.mask.right, spec.mask.left};
  std::size_t next_run = 0;
  for (std::size_t i = 0; i < task.rows.size();) {
    const std::int32_t number = task.rows[i].sequence;
    const BackwardSequence& lengths = task.sequences[static_cast<std::size_t>(number)];
    Sequence sequence{};
    const std::int64_t first_query = first_query_tile(lengths);
    if (of_queries) {
      sequence.row_begin = lengths.q_offset;
      sequence.row_end = lengths.q_offset + lengths.q_len;
      sequence.other_end = lengths.k_len;
    } else {
      sequence.origin = first_query;
      sequence.row_begin = -first_query;
      sequence.row_end = lengths.k_len - first_query;
      sequence.other_begin = lengths.q_offset - first_query;
      sequence.other_end = sequence.other_begin + lengths.q_len;
    }
    sequence.tiles_per_split = static_cast<std::int32_t>(shape.split / shape.other_tile);
    const std::int64_t first_tile = floor_quotient(sequence.origin, shape.other_tile);
    sequence.split_phase = static_cast<std::int32_t>(first_tile - floor_quotient(first_tile, sequence.tiles_per_split) *
                                                                      sequence.tiles_per_split);
    while (next_run < task.runs.size() && task.runs[next_run].sequence < number) ++next_run;
    sequence.run_begin = static_cast<std::int32_t>(next_run);
    while (next_run < task.runs.size() && task.runs[next_run].sequence == number) ++next_run;
    sequence.run_end = static_cast<std::int32_t>(next_run);
    const std::size_t first_row_tile = row_tiles_.size();
    for (; i < task.rows.size() && task.rows[i].sequence == number; ++i) {
      add_rows(task, shape, mask, task.rows[i], sequence, finish);
    }
    if (!of_queries && shape.spills) place_ds(spec.heads / spec.kv_heads, number, sequence.origin, first_row_tile);
    pair_up(shape, sequence, first_row_tile);
  }
  sort_pairs();
  if (finish && !task.resume && !task.save) share_splits(shape, spec.kv_heads);

  BackwardTableLayout layout = layout_of(pairs_.size(), row_tiles_.size(), runs_.size(), task.tiles.size(),
                                         sources.bulk ? 0 : task.tiles.size(), merged_.size(), ds_.size());
  if (layout.bytes > memory.size()) {
    fail(ErrorCode::kInternal, fmt::format("the tables of a backward task need {} bytes", layout.bytes),
         fmt::format("{} are reserved", memory.size()));
  }
  layout.pair_count = static_cast<std::int32_t>(pairs_.size());
  layout.merged_count = static_cast<std::int32_t>(merged_.size());
  layout.ds_tiles = ds_tiles_;
  layout.swizzle_heads = swizzle_heads_of(
      spec.kv_heads, static_cast<std::int64_t>(task.tiles.size()) * shape.other_tile * shape.head_bytes,
      shape.swizzle_bytes);
  std::memset(memory.data(), 0, layout.pairs);
  const auto copy = [&](std::size_t offset, const auto& table) {
    if (!table.empty()) std::memcpy(memory.data() + offset, table.data(), table.size() * sizeof(table[0]));
  };
  copy(layout.pairs, pairs_);
  copy(layout.row_tiles, row_tiles_);
  copy(layout.runs, runs_);
  copy(layout.tiles, tiles_);
  copy(layout.merged, merged_);
  copy(layout.ds, ds_);
  auto* tile_rows = reinterpret_cast<TileRows*>(memory.data() + layout.tile_rows);
  for (std::size_t i = 0; !sources.bulk && i < task.tiles.size(); ++i) {
    tile_rows[i] = sources.rows[static_cast<std::size_t>(task.tiles[i].source)];
  }
  return layout;
}

void BackwardTableBuilder::add_tiles(const BackwardTask& task, const BackwardShape& shape,
                                     const BackwardSources& sources) {
  tiles_.assign(task.tiles.size(), OtherTile{});
  for (const KeyRun& run : task.runs) {
    const BackwardSequence& lengths = task.sequences[static_cast<std::size_t>(run.sequence)];
    const bool of_keys = shape.rows == BackwardSide::kQueries;
    const std::int64_t begin = of_keys ? 0 : lengths.q_offset - first_query_tile(lengths);
    const std::int64_t end = begin + (of_keys ? lengths.k_len : lengths.q_len);
    for (std::int64_t i = 0; i < run.tiles; ++i) {
      const std::int64_t first = (run.first_tile + i) * shape.other_tile;
      const PageRun& page = task.tiles[static_cast<std::size_t>(run.table + i)];
      OtherTile& tile = tiles_[static_cast<std::size_t>(run.table + i)];
      tile.begin = static_cast<std::int32_t>(std::max(begin - first, std::int64_t{0}));
      tile.end = static_cast<std::int32_t>(std::min(end - first, std::int64_t{shape.other_tile}));
      tile.row = page.row - tile.begin;
      tile.source = page.source;
      if (!sources.stats.empty()) tile.stats = sources.stats[static_cast<std::size_t>(page.source)];
    }
  }
}

// Assigns places in the DsSpill to the dS of a sequence's row tiles of keys.
void BackwardTableBuilder::place_ds(int group, std::int32_t sequence, std::int64_t origin, std::size_t first_row_tile) {
  const auto first_tile = static_cast<std::int32_t>(floor_quotient(origin, kBackwardTile));
  for (std::size_t i = first_row_tile; i < row_tiles_.size(); ++i) {
    RowTile& tile = row_tiles_[i];
    tile.ds = ds_tiles_;
    if (tile.begin_tile >= tile.end_tile) continue;
    const std::int32_t begin = first_tile + tile.begin_tile;
    placed_ds_.push_back({sequence,
                          first_tile + tile.offset / kBackwardTile,
                          {ds_tiles_ - begin * group, begin, first_tile + tile.end_tile, 0}});
    ds_tiles_ += (tile.end_tile - tile.begin_tile) * group;
  }
}

// Finds the dS of the keys of a task of dQ.
void BackwardTableBuilder::find_ds(const BackwardTask& task) {
  ds_.assign(kDsTilesOfKeyTile * task.tiles.size(), DsOfKeys{});
  auto next = placed_ds_.begin();
  for (const KeyRun& run : task.runs) {
    const std::int64_t keys = task.sequences[static_cast<std::size_t>(run.sequence)].k_len;
    for (std::int64_t i = 0; i < kDsTilesOfKeyTile * run.tiles; ++i) {
      const std::int64_t tile = kDsTilesOfKeyTile * run.first_tile + i;
      while (next != placed_ds_.end() &&
             (next->sequence != run.sequence ? next->sequence < run.sequence : next->tile < tile)) {
        ++next;
      }
      DsOfKeys& ds = ds_[static_cast<std::size_t>(kDsTilesOfKeyTile * run.table + i)];
      if (next != placed_ds_.end() && next->sequence == run.sequence && next->tile == tile) ds = next->ds;
      ds.keys = static_cast<std::int32_t>(
          std::clamp(keys - tile * kBackwardTile, std::int64_t{0}, std::int64_t{kBackwardTile}));
    }
  }
}

void BackwardTableBuilder::add_rows(const BackwardTask& task, const BackwardShape& shape, const Mask& mask,
                                    const QueryRun& rows, const Sequence& sequence, bool finish) {
  // the row tiles begin at multiples of kBackwardTile, also counted from the origin
  const std::int64_t begin = rows.position - sequence.origin;
  const std::int64_t end = begin + rows.rows;
  for (std::int64_t at = query_tile_begin(begin, kBackwardTile); at < end; at += kBackwardTile) {
    const RowTile tile = row_tile(task, shape, mask, rows, sequence, at);
    if (tile.begin_tile < tile.end_tile || finish) row_tiles_.push_back(tile);
  }
}

RowTile BackwardTableBuilder::row_tile(const BackwardTask& task, const BackwardShape& shape, const Mask& mask,
                                       const QueryRun& rows, const Sequence& sequence, std::int64_t tile_begin) const {
  const std::int64_t begin = rows.position - sequence.origin;
  RowTile tile{};
  tile.row = rows.row + tile_begin - begin;
  tile.offset = narrow(tile_begin);
  tile.valid_begin = static_cast<std::int32_t>(std::max(begin - tile_begin, std::int64_t{0}));
  tile.valid_end = static_cast<std::int32_t>(std::min(begin + rows.rows - tile_begin, std::int64_t{kBackwardTile}));
  // The range of tiles follows from all of the sequence's rows in the row tile, including rows of other ranks.
  const std::int64_t first = std::max(tile_begin, sequence.row_begin);
  const std::int64_t last = std::min(tile_begin + kBackwardTile, sequence.row_end) - 1;
  KeyRange seen = Visibility(mask, sequence.other_end).keys(first, last);
  seen.begin = std::max(seen.begin, sequence.other_begin);
  const TileRange all = tiles_of(seen, shape.other_tile);
  if (all.empty()) return tile;
  bool found = false;
  for (std::int32_t i = sequence.run_begin; i < sequence.run_end; ++i) {
    const TileRun& run = runs_[static_cast<std::size_t>(i)];
    const auto from = std::max(static_cast<std::int32_t>(all.begin), run.first_tile);
    const auto to = std::min(static_cast<std::int32_t>(all.end), run.first_tile + run.tiles);
    if (from >= to) continue;
    if (!found) tile.begin_tile = from;
    tile.end_tile = to;
    found = true;
  }
  const auto split = [&](std::int64_t t) { return (t + sequence.split_phase) / sequence.tiles_per_split; };
  if (!found) {
    if (task.resume) tile.flags = RowTile::kHasClosedSum;  // only finished tasks compute such rows
    return tile;
  }
  if (task.resume && tile.begin_tile > all.begin) {
    if (split(tile.begin_tile) > split(all.begin)) tile.flags |= RowTile::kHasClosedSum;
    if (split(tile.begin_tile) == split(tile.begin_tile - 1)) tile.flags |= RowTile::kHasOpenSum;
  }
  if (tile.end_tile < all.end && split(tile.end_tile) == split(tile.end_tile - 1)) tile.flags |= RowTile::kStaysOpen;
  // Partial tiles of keys need a mask. Those of queries don't, as absent queries are loaded as zeros.
  const std::int64_t others = shape.rows == BackwardSide::kQueries
                                  ? sequence.other_end
                                  : (sequence.other_end + shape.other_tile - 1) / shape.other_tile * shape.other_tile;
  const KeyRange common = Visibility(mask, others).common_keys(first, last);
  if (!common.empty()) {
    tile.unmasked_begin = narrow(quotient(common.begin + shape.other_tile - 1, shape.other_tile));
    tile.unmasked_end = narrow(quotient(common.end, shape.other_tile));
  }
  return tile;
}

std::int32_t BackwardTableBuilder::tiles_between(const RowTilePair& pair, std::int32_t begin, std::int32_t end) const {
  std::int32_t tiles = 0;
  for (std::int32_t i = pair.run_begin; i < pair.run_end; ++i) {
    const TileRun& run = runs_[static_cast<std::size_t>(i)];
    tiles += std::max(0, std::min(end, run.first_tile + run.tiles) - std::max(begin, run.first_tile));
  }
  return tiles;
}

void BackwardTableBuilder::pair_up(const BackwardShape& shape, const Sequence& sequence, std::size_t first_row_tile) {
  const std::size_t group = static_cast<std::size_t>(shape.group);
  const std::size_t head_tiles = (row_tiles_.size() - first_row_tile) * group;
  for (std::size_t n = 0; n < head_tiles;) {
    const std::size_t index = first_row_tile + n / group;
    const RowTile& first = row_tiles_[index];
    RowTilePair pair{};
    pair.row_tile = static_cast<std::int32_t>(index);
    pair.head = static_cast<std::int32_t>(n % group);
    pair.count = 1;
    pair.begin_tile = first.begin_tile;
    pair.end_tile = first.end_tile;
    for (std::size_t other = n + 1; pair.count < shape.head_tiles && other < head_tiles; ++other) {
      // Row tiles without common tiles would only wait for each other's tiles.
      const RowTile& next = row_tiles_[first_row_tile + other / group];
      if (std::max(pair.begin_tile, next.begin_tile) >= std::min(pair.end_tile, next.end_tile)) break;
      ++pair.count;
      pair.begin_tile = std::min(pair.begin_tile, next.begin_tile);
      pair.end_tile = std::max(pair.end_tile, next.end_tile);
    }
    pair.run_begin = sequence.run_begin;
    pair.run_end = sequence.run_end;
    pair.tiles = tiles_between(pair, pair.begin_tile, pair.end_tile);
    pair.other_end = narrow(sequence.other_end);
    pair.split_phase = sequence.split_phase;
    pair.partial = RowTilePair::kNoPartial;
    pairs_.push_back(pair);
    n += static_cast<std::size_t>(pair.count);
  }
}

void BackwardTableBuilder::sort_pairs() {
  std::sort(pairs_.begin(), pairs_.end(), [](const RowTilePair& a, const RowTilePair& b) {
    if (a.tiles != b.tiles) return a.tiles > b.tiles;
    if (a.row_tile != b.row_tile) return a.row_tile < b.row_tile;
    return a.head != b.head ? a.head < b.head : a.begin_tile < b.begin_tile;
  });
}

void BackwardTableBuilder::share_splits(const BackwardShape& shape, int kv_heads) {
  const std::size_t heads = static_cast<std::size_t>(kv_heads);
  const std::size_t count = pairs_.size() * heads;
  const auto ctas = static_cast<std::size_t>(shape.ctas);
  if (shape.partials == 0 || count == 0 || count >= 2 * ctas) return;
  // CTAs take the longest work first. With at most two items per CTA, the shortest ones follow the longest, in reverse
  // order.
  const auto tiles_of_work = [&](std::size_t n) { return std::int64_t{pairs_[n / heads].tiles}; };
  std::int64_t all = 0, longest = 0;
  for (std::size_t n = 0; n < count; ++n) {
    all += tiles_of_work(n);
    const std::size_t before = n < ctas ? n : 2 * ctas - 1 - n;
    longest = std::max(longest, tiles_of_work(n) + (n < ctas ? 0 : tiles_of_work(before)));
  }
  const std::int64_t share = all / shape.ctas;
  if (longest <= share + share / kTolerableWait) return;
  const std::int32_t tiles_per_split = static_cast<std::int32_t>(shape.split / shape.other_tile);
  std::int64_t partials = 0;
  for (std::size_t i = 0, whole = pairs_.size(); i < whole; ++i) {
    const RowTilePair pair = pairs_[i];
    const auto split = [&](std::int32_t tile) { return (tile + pair.split_phase) / tiles_per_split; };
    const std::int32_t first = split(pair.begin_tile);
    const std::int32_t splits = pair.tiles == 0 ? 0 : split(pair.end_tile - 1) - first + 1;
    if (pair.tiles <= share / 2 || splits < 2 || partials + splits > shape.partials) continue;
    for (std::int32_t n = 0; n < splits; ++n) {
      RowTilePair part = pair;
      part.begin_tile = std::max(pair.begin_tile, (first + n) * tiles_per_split - pair.split_phase);
      part.end_tile = std::min(pair.end_tile, (first + n + 1) * tiles_per_split - pair.split_phase);
      part.tiles = tiles_between(part, part.begin_tile, part.end_tile);
      part.partial = static_cast<std::int32_t>(partials) + n;
      if (n == 0) {
        pairs_[i] = part;
      } else {
        pairs_.push_back(part);
      }
    }
    for (std::int32_t n = 0; n < pair.count; ++n) {
      const std::int32_t row_tile = pair.row_tile + (pair.head + n) / shape.group;
      const RowTile& rows = row_tiles_[static_cast<std::size_t>(row_tile)];
      const bool any = rows.begin_tile < rows.end_tile;
      const std::int32_t begin = any ? split(rows.begin_tile) : first;
      merged_.push_back({row_tile, (pair.head + n) % shape.group, n,
                         static_cast<std::int32_t>(partials) + begin - first,
                         any ? split(rows.end_tile - 1) - begin + 1 : 0});
    }
    partials += splits;
  }
  sort_pairs();
}

}  // namespace ringattn::cuda
