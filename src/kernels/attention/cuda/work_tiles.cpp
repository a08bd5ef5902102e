// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/cuda/work_tiles.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <span>

#include "base/error.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/task_geometry.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::size_t kTableAlignment = 256;
// CTAs form a cluster unless too many tiles of the shared KV loop would be skipped. Per CTA, at most one tile
// more than without the cluster is accepted in every kWorthwhile · head_tiles tiles, where head_tiles is the number of
// one CTA. The more head work tiles of one CTA share a KV tile already, the less a cluster gains.
constexpr std::int64_t kWorthwhile = 16;
// CTAs keep pace if one head's K and V are more than this many times the cache. In shorter KV loops they don't drift
// far apart.
constexpr std::int64_t kFarBeyondCache = 6;

// The task's page map is copied into the table unchanged.
static_assert(sizeof(TileEntry) == sizeof(PageRun) && offsetof(TileEntry, source) == offsetof(PageRun, source) &&
              offsetof(TileEntry, row) == offsetof(PageRun, row));

std::size_t append_table(std::size_t& bytes, std::size_t size) {
  const std::size_t offset = bytes;
  bytes += (size + kTableAlignment - 1) / kTableAlignment * kTableAlignment;
  return offset;
}

TableLayout lay_out(std::size_t runs, std::size_t tiles, std::size_t positions, std::size_t sources,
                    std::size_t work_tiles, std::size_t gqa_tiles, std::int64_t ctas) {
  TableLayout layout;
  layout.runs = append_table(layout.bytes, runs * sizeof(RunEntry));
  layout.tiles = append_table(layout.bytes, tiles * sizeof(TileEntry));
  layout.positions = append_table(layout.bytes, positions * sizeof(std::int32_t));
  layout.sources = append_table(layout.bytes, sources * sizeof(SourceEntry));
  layout.work_tiles = append_table(layout.bytes, work_tiles * sizeof(WorkTile));
  layout.gqa_tiles = append_table(layout.bytes, gqa_tiles * sizeof(GqaPackedTile));
  layout.counters = append_table(layout.bytes, static_cast<std::size_t>(1 + ctas) * sizeof(std::int32_t));
  return layout;
}

// Number of heads with block masks or key positions, and so work tiles, of their own.
int own_heads(const AttentionSpec& spec) { return std::max({1, spec.block_mask.heads, spec.positions}); }

// Upper bound of the query blocks that a task's rows lie in: each run may begin and end inside of one.
std::int64_t max_blocks(const AttentionSpec& spec, const AttentionLimits& limits) {
  return limits.rows / spec.block_mask.query_block + 2 * limits.query_runs;
}

// Each query run, and each query block, may begin and end inside of a tile.
std::int64_t max_work_tiles(const AttentionSpec& spec, const WorkTileShape& shape, const AttentionLimits& limits) {
  std::int64_t work_tiles = limits.rows / shape.tile_rows + 2 * limits.query_runs;
  if (spec.block_mask.any() && shape.query_tile == 1) work_tiles += max_blocks(spec, limits);
  return std::min(limits.rows, work_tiles) * own_heads(spec);
}

// Query heads of one KV head that a work tile counts for.
int heads_per_gqa_tile(const AttentionSpec& spec) {
  return spec.block_mask.heads > spec.kv_heads ? 1 : spec.heads / spec.kv_heads;
}

// The first gqa_tile of a stretch may have fewer head work tiles than the others.
std::int64_t max_gqa_tiles(const AttentionSpec& spec, const WorkTileShape& shape, const AttentionLimits& limits) {
  if (shape.head_tiles == 1) return 0;
  const std::int64_t stretches =
      (spec.block_mask.any() ? max_blocks(spec, limits) : limits.sequences) * own_heads(spec);
  return max_work_tiles(spec, shape, limits) * heads_per_gqa_tile(spec) / shape.head_tiles + stretches;
}

// A mask row's runs are in the table once per query block, a sequence's runs once per list of key positions.
std::int64_t max_runs(const AttentionSpec& spec, const AttentionLimits& limits) {
  return spec.block_mask.any() ? limits.mask_tile_runs : limits.key_runs * own_heads(spec);
}

// Key positions in the table for this number of tiles.
std::int64_t positions_of_tiles(const AttentionSpec& spec, const WorkTileShape& shape, std::int64_t tiles) {
  return tiles * spec.positions * shape.key_tile;
}

// Head work tiles of a sequence's first gqa_tile, if the others have `max_head_tiles` each. A remainder goes into the
// first one, because under a causal mask its KV loop is the shortest.
std::size_t head_tiles_of_first(std::size_t head_tiles, std::size_t max_head_tiles) {
  return head_tiles % max_head_tiles == 0 ? max_head_tiles : head_tiles % max_head_tiles;
}

// Tiles [begin, end) of a sequence's runs: the union of the KV tiles of several work tiles.
struct KvLoopRange {
  std::int64_t begin = std::numeric_limits<std::int64_t>::max();
  std::int64_t end = 0;

  void add(const WorkTile& work_tile) {
    if (work_tile.tiles > 0) add(KvLoopRange{work_tile.first, work_tile.first + work_tile.tiles});
  }
  void add(const KvLoopRange& other) {
    begin = std::min(begin, other.begin);
    end = std::max(end, other.end);
  }
  std::int64_t tiles() const { return std::max<std::int64_t>(0, end - begin); }
};

// Finds which of a task's KV tiles a work tile attends to.

// The key runs of one sequence of a task, or of one row of its block mask.
class SequenceRuns {
 public:
  SequenceRuns(std::span<const RunEntry> entries, std::span<const KeyRun> runs) : entries_(entries), runs_(runs) {}

  // Sets the KV tiles of the work tile: those in `range` that the task has. Leaves it without tiles if there are none.
  void assign(const TileRange& range, std::size_t first_entry, WorkTile& work_tile) const {
    const auto ends_before = [](const KeyRun& run, std::int64_t tile) { return run.first_tile + run.tiles <= tile; };
    const auto begins_before = [](const KeyRun& run, std::int64_t tile) { return run.first_tile < tile; };
    const auto begin = std::lower_bound(runs_.begin(), runs_.end(), range.begin, ends_before);
    const auto end = std::lower_bound(begin, runs_.end(), range.end, begins_before);
    if (begin == end) return;
    const auto index = static_cast<std::size_t>(begin - runs_.begin());
    const auto last = static_cast<std::size_t>(end - runs_.begin() - 1);
    work_tile.first_tile = std::max(range.begin, begin->first_tile);
    const std::int64_t skipped = work_tile.first_tile - begin->first_tile;
    work_tile.table = begin->table + skipped;
    work_tile.first = entries_[index].first + skipped;
    work_tile.tiles = static_cast<std::int32_t>(
        entries_[last].first + std::min(range.end - runs_[last].first_tile, runs_[last].tiles) - work_tile.first);
    work_tile.run_begin = static_cast<std::int32_t>(first_entry + index);
    work_tile.runs = static_cast<std::int32_t>(last - index + 1);
  }

 private:
  std::span<const RunEntry> entries_;
  std::span<const KeyRun> runs_;
};

// Late entries have at most 1 / kLatePart of the longest entry's tiles. Their number is chosen so that late work per
// worker is about 1 / kLateWork of the longest entry's tiles.
constexpr std::int64_t kLatePart = 4;
constexpr std::int64_t kLateWork = 2;
// The swizzle group of the late entries.
constexpr std::int32_t kLate = std::numeric_limits<std::int32_t>::max();

bool shorter(const SchedulerEntry& a, const SchedulerEntry& b) { return a.tiles < b.tiles; }

}  // namespace

void SchedulerOrder::reserve(std::size_t entries) {
  entries_.reserve(entries);
  unsorted_.reserve(entries);
  counts_.resize(4 * entries);
}

std::int32_t SchedulerOrder::max_tiles() const {
  return entries_.empty() ? 0 : std::max_element(entries_.begin(), entries_.end(), shorter)->tiles;
}

std::int32_t SchedulerOrder::sort(std::int64_t workers, std::int64_t heads) {
  if (entries_.empty()) return 0;
  const std::int32_t early = move_late_entries_back(workers, heads);
  for (auto begin = entries_.begin(); begin != entries_.end();) {
    const std::int32_t swizzle_group = begin->swizzle_group;
    const auto end = std::find_if(begin, entries_.end(),
                                  [&](const SchedulerEntry& entry) { return entry.swizzle_group != swizzle_group; });
    sort_swizzle_group({begin, end});
    begin = end;
  }
  return early;
}

// The task ends with its last entry. The last entries should be short, and there should be enough of them to even out
// the load of the long ones. Short entries of all swizzle groups serve for that, but no more than needed, because late
// entries hit L2 less often. Returns the number of early entries.
std::int32_t SchedulerOrder::move_late_entries_back(std::int64_t workers, std::int64_t heads) {
  const std::int64_t longest_tiles = max_tiles();
  const std::int64_t longest = std::min(longest_tiles / kLatePart, static_cast<std::int64_t>(counts_.size()) - 1);
  std::fill_n(counts_.begin(), longest + 1, 0);
  for (const SchedulerEntry& entry : entries_) {
    if (entry.tiles <= longest) ++counts_[static_cast<std::size_t>(entry.tiles)];
  }
  // Entries of fewer than `limit` tiles are late.
  std::int64_t budget = workers * longest_tiles / kLateWork;
  std::int64_t limit = 0;
  for (; limit <= longest && budget >= 0; ++limit) budget -= limit * counts_[static_cast<std::size_t>(limit)] * heads;

  unsorted_.clear();
  std::size_t early = 0;
  for (const SchedulerEntry& entry : entries_) {
    if (entry.tiles >= limit) {
      entries_[early++] = entry;
    } else {
      unsorted_.push_back({kLate, entry.tiles, entry.index});
    }
  }
  std::ranges::copy(unsorted_, entries_.begin() + static_cast<std::ptrdiff_t>(early));
  return static_cast<std::int32_t>(early);
}

void SchedulerOrder::sort_swizzle_group(std::span<SchedulerEntry> swizzle_group) {
  // Most swizzle groups are in order already or, under a causal mask, in reverse order.
  if (std::is_sorted(swizzle_group.begin(), swizzle_group.end())) return;
  if (std::is_sorted(swizzle_group.rbegin(), swizzle_group.rend())) {
    std::reverse(swizzle_group.begin(), swizzle_group.end());
    return;
  }
  const auto longest_tiles =
      static_cast<std::size_t>(std::max_element(swizzle_group.begin(), swizzle_group.end(), shorter)->tiles);
  if (longest_tiles >= counts_.size()) {
    std::sort(swizzle_group.begin(), swizzle_group.end(), [](const SchedulerEntry& a, const SchedulerEntry& b) {
      if (a < b || b < a) return a < b;
      return a.index < b.index;
    });
    return;
  }
  // There are not many more lengths than entries, so a counting sort is fastest.
  std::fill_n(counts_.begin(), longest_tiles + 1, 0);
  for (const SchedulerEntry& entry : swizzle_group) ++counts_[longest_tiles - static_cast<std::size_t>(entry.tiles)];
  std::exclusive_scan(counts_.begin(), counts_.begin() + static_cast<std::ptrdiff_t>(longest_tiles) + 1,
                      counts_.begin(), 0);
  unsorted_.assign(swizzle_group.begin(), swizzle_group.end());
  for (const SchedulerEntry& entry : unsorted_) {
    std::int32_t& next_index = counts_[longest_tiles - static_cast<std::size_t>(entry.tiles)];
    swizzle_group[static_cast<std::size_t>(next_index++)] = entry;
  }
}

std::int64_t kv_head_bytes(const AttentionSpec& spec) {
  return std::int64_t{spec.head_dim + spec.head_dim_v} * static_cast<std::int64_t>(size_of(spec.dtype));
}

SourceEntry source_entry(const KeySource& source) {
  SourceEntry entry{
      source.k.data,         source.v.data,        source.k.tokens,      source.k.token_stride, source.k.head_stride,
      source.v.token_stride, source.v.head_stride, source.k_page_stride, source.v_page_stride,  kNoPages};
  if (source.page_size > 0) entry.page_log = std::countr_zero(static_cast<std::uint64_t>(source.page_size));
  return entry;
}

std::size_t table_bytes(const AttentionSpec& spec, const WorkTileShape& shape, const AttentionLimits& limits) {
  const auto count = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  return lay_out(count(max_runs(spec, limits)), count(limits.tiles),
                 count(positions_of_tiles(spec, shape, limits.tiles)), count(limits.sources),
                 count(max_work_tiles(spec, shape, limits)), count(max_gqa_tiles(spec, shape, limits)), shape.ctas)
      .bytes;
}

void WorkBuilder::reserve(const AttentionSpec& spec, const WorkTileShape& shape, const AttentionLimits& limits) {
  const auto work_tiles = static_cast<std::size_t>(max_work_tiles(spec, shape, limits));
  const auto gqa_tiles = static_cast<std::size_t>(max_gqa_tiles(spec, shape, limits));
  work_tiles_.reserve(work_tiles);
  gqa_tiles_.reserve(gqa_tiles);
  order_.reserve(std::max(work_tiles, gqa_tiles));
  runs_.reserve(static_cast<std::size_t>(max_runs(spec, limits)));
  stretches_.reserve(spec.block_mask.any() ? work_tiles : static_cast<std::size_t>(limits.sequences * own_heads(spec)));
}

// Heads with key positions of their own follow each other, so that a swizzle group's work tiles read the keys of few
// heads.
void WorkBuilder::collect(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape) {
  SwizzleGroup swizzle_group;
  for (int list = 0; list < std::max(1, spec.positions); ++list)
    collect_positions(spec, task, shape, list, swizzle_group);
}

void WorkBuilder::collect_positions(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape,
                                    int list, SwizzleGroup& swizzle_group) {
  const bool all_rows = takes_all_rows(task);
  const int mask_heads = std::max(1, spec.positions);
  const std::int64_t token_bytes = spec.kv_heads / mask_heads * kv_head_bytes(spec);

  auto next_run = task.key_runs.begin();
  for (auto run = task.queries.begin(); run != task.queries.end();) {
    const std::int32_t sequence = run->sequence;
    const std::int64_t key_length = task.key_lengths[static_cast<std::size_t>(sequence)];
    while (next_run != task.key_runs.end() && next_run->sequence < sequence) ++next_run;
    const auto first_run = next_run;
    const std::size_t first_entry = runs_.size();
    std::int64_t tiles = 0;
    for (; next_run != task.key_runs.end() && next_run->sequence == sequence; ++next_run) {
      runs_.push_back({next_run->first_tile, tiles, next_run->table});
      tiles += next_run->tiles;
    }
    const SequenceRuns keys(std::span<const RunEntry>(runs_).subspan(first_entry), {first_run, next_run});
    const std::int64_t bytes = tiles * shape.key_tile * token_bytes;
    swizzle_group.add(bytes, shape.cache_bytes);

    const Visibility visibility(spec.mask, key_length);
    std::optional<PositionedVisibility> positioned;
    if (task.positions != nullptr) {
      positioned.emplace(spec.mask, task.positions->of(static_cast<std::size_t>(sequence), list));
    }
    for (; run != task.queries.end() && run->sequence == sequence; ++run) {
      const std::int64_t run_end = run->position + run->rows;
      for (std::int64_t begin = run->position; begin < run_end;) {
        WorkTile& work_tile = work_tiles_.emplace_back();  // in place: copies of freshly written memory are slow
        work_tile.position = query_tile_begin(begin, shape.query_tile);
        const std::int64_t end = std::min(work_tile.position + shape.tile_rows, run_end);
        work_tile.row = run->row + (work_tile.position - run->position);
        work_tile.key_length = key_length;
        work_tile.valid_row_begin = static_cast<std::int32_t>(begin - work_tile.position);
        work_tile.valid_row_end = static_cast<std::int32_t>(end - work_tile.position);
        // All rows of a query tile attend to the same tiles. Without query tiles a row attends to those that it sees.
        const std::int64_t last = shape.query_tile > 1 ? work_tile.position + shape.query_tile - 1 : end - 1;
        work_tile.head = list * (spec.heads / mask_heads);
        work_tile.position_list = list;
        const KeyRange seen =
            positioned ? positioned->keys(work_tile.position, last) : visibility.keys(work_tile.position, last);
        const TileRange range = tiles_of(seen, shape.key_tile);
        if (!range.empty()) keys.assign(range, first_entry, work_tile);
        work_tile.split_position = static_cast<std::int32_t>(work_tile.first_tile % kTilesPerKvSplit);
        if (positioned && work_tile.tiles > 0) {
          set_unmasked_tiles(positioned->common_keys(work_tile.position, last), shape.key_tile, work_tile);
        }
        if (work_tile.tiles == 0 && !all_rows) work_tiles_.pop_back();
        begin = end;
      }
    }
    stretches_.push_back({work_tiles_.size(), swizzle_group.number});
  }
}

// Writes the positions of the keys of all tiles that the task has, in the order of the page map.
void WorkBuilder::write_positions(const AttentionTask& task, const WorkTileShape& shape, std::int32_t* positions) {
  const int mask_heads = task.positions->heads();
  for (const KeyRun& run : task.key_runs) {
    for (int list = 0; list < mask_heads; ++list) {
      const auto of_keys = task.positions->of(static_cast<std::size_t>(run.sequence), list);
      for (std::int64_t tile = 0; tile < run.tiles; ++tile) {
        std::int32_t* const to = positions + ((run.table + tile) * mask_heads + list) * shape.key_tile;
        const auto first = static_cast<std::size_t>((run.first_tile + tile) * shape.key_tile);
        const std::size_t count = std::min(of_keys.size() - first, static_cast<std::size_t>(shape.key_tile));
        std::fill(std::copy_n(of_keys.begin() + static_cast<std::ptrdiff_t>(first), count, to), to + shape.key_tile,
                  kNoPosition);
      }
    }
  }
}

// Makes the entries: the work tiles themselves, or gqa_tiles of `head_tiles` head work tiles.
void WorkBuilder::cut(int heads_per_gqa_tile, int head_tiles) {
  gqa_tiles_.clear();
  order_.clear();
  std::size_t first_work_tile = 0;
  for (const Stretch& stretch : stretches_) {
    if (head_tiles > 1) {
      gqa_tile(heads_per_gqa_tile, head_tiles, first_work_tile, stretch);
    } else {
      for (std::size_t i = first_work_tile; i < stretch.end_tile; ++i) {
        order_.add({stretch.swizzle_group, work_tiles_[i].tiles, static_cast<std::int32_t>(i)});
      }
    }
    first_work_tile = stretch.end_tile;
  }
}

// Makes gqa_tiles of the work tiles of one stretch, which begin at `first_work_tile`. A work tile's head work tiles,
// one for each query head of a KV head, follow each other, then the next work tile's. Neighbours attend to nearly the
// same KV tiles.
void WorkBuilder::gqa_tile(int heads_per_gqa_tile, int head_tiles_of_gqa_tile, std::size_t first_work_tile,
                           const Stretch& stretch) {
  const auto heads = static_cast<std::uint32_t>(heads_per_gqa_tile);
  const auto head_tiles = static_cast<std::uint32_t>(stretch.end_tile - first_work_tile) * heads;
  const auto max_head_tiles = static_cast<std::uint32_t>(head_tiles_of_gqa_tile);
  auto count = static_cast<std::uint32_t>(head_tiles_of_first(head_tiles, max_head_tiles));
  for (std::uint32_t head_tile = 0; head_tile < head_tiles; head_tile += count, count = max_head_tiles) {
    const std::size_t first = first_work_tile + head_tile / heads;
    const std::size_t last = first_work_tile + (head_tile + count - 1) / heads;
    GqaPackedTile& gqa_tile = gqa_tiles_.emplace_back();
    gqa_tile.work_tile = static_cast<std::int32_t>(first);
    gqa_tile.head = static_cast<std::int32_t>(head_tile % heads);
    gqa_tile.head_tiles = static_cast<std::int32_t>(count);
    std::int64_t end = 0;
    for (std::size_t i = first; i <= last; ++i) {
      const WorkTile& work_tile = work_tiles_[i];
      if (work_tile.tiles == 0) continue;
      const std::int32_t run_end = std::max(work_tile.run_begin + work_tile.runs, gqa_tile.run_begin + gqa_tile.runs);
      if (end == 0 || work_tile.first < gqa_tile.first) {
        gqa_tile.first = work_tile.first;
        gqa_tile.first_tile = work_tile.first_tile;
        gqa_tile.table = work_tile.table;
        gqa_tile.run_begin = work_tile.run_begin;
      }
      gqa_tile.runs = run_end - gqa_tile.run_begin;
      end = std::max(end, work_tile.first + work_tile.tiles);
    }
    gqa_tile.tiles = static_cast<std::int32_t>(end - gqa_tile.first);
    order_.add({stretch.swizzle_group, gqa_tile.tiles, static_cast<std::int32_t>(gqa_tiles_.size() - 1)});
  }
}

// Returns true if a CTA cluster pays off. Its KV loop covers the tiles of all its CTAs, and each CTA skips those that
// only another one attends to.
bool WorkBuilder::clusters_pay(int heads_per_gqa_tile, const WorkTileShape& shape) const {
  const auto heads = static_cast<std::size_t>(heads_per_gqa_tile);
  const auto of_cta = static_cast<std::size_t>(shape.head_tiles);
  const std::size_t max_head_tiles = of_cta * static_cast<std::size_t>(shape.cluster_ctas);
  std::int64_t clustered = 0;  // KV loop tiles of all CTAs of the clusters
  std::int64_t separate = 0;   // the same without clusters
  std::size_t first_work_tile = 0;
  for (const Stretch& stretch : stretches_) {
    const std::size_t head_tiles = (stretch.end_tile - first_work_tile) * heads;
    std::size_t count = head_tiles_of_first(head_tiles, max_head_tiles);
    for (std::size_t head_tile = 0; head_tile < head_tiles; head_tile += count, count = max_head_tiles) {
      KvLoopRange shared;
      for (std::size_t cta_begin = head_tile; cta_begin < head_tile + count; cta_begin += of_cta) {
        const std::size_t last = std::min(cta_begin + of_cta, head_tile + count) - 1;
        KvLoopRange own;
        for (std::size_t i = first_work_tile + cta_begin / heads; i <= first_work_tile + last / heads; ++i)
          own.add(work_tiles_[i]);
        separate += own.tiles();
        shared.add(own);
      }
      clustered += shape.cluster_ctas * shared.tiles();
    }
    first_work_tile = stretch.end_tile;
  }
  const std::int64_t worthwhile = kWorthwhile * shape.head_tiles;
  return clustered * worthwhile <= separate * (worthwhile + 1);
}

TableLayout WorkBuilder::build(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape,
                               std::span<std::byte> memory) {
  work_tiles_.clear();
  stretches_.clear();
  runs_.clear();
  std::int64_t longest_masked = 0;
  if (task.block_mask == nullptr) {
    collect(spec, task, shape);
  } else {
    longest_masked = collect_masked(spec, task, shape);
  }
  const int heads_of_head_tile = heads_per_gqa_tile(spec);
  const std::int32_t cluster_ctas =
      shape.cluster_ctas > 1 && clusters_pay(heads_of_head_tile, shape) ? shape.cluster_ctas : 1;
  cut(heads_of_head_tile, shape.head_tiles * cluster_ctas);
  const std::size_t far_sources = task.sources.size() > kInlineSources ? task.sources.size() : 0;
  const auto tiles = static_cast<std::int64_t>(task.tiles.size()) / task.page_runs;
  TableLayout layout =
      lay_out(runs_.size(), task.tiles.size(), static_cast<std::size_t>(positions_of_tiles(spec, shape, tiles)),
              far_sources, work_tiles_.size(), gqa_tiles_.size(), shape.ctas);
  if (layout.bytes > memory.size()) {
    fail(ErrorCode::kInternal, fmt::format("an attention task needs {} bytes of tables", layout.bytes),
         fmt::format("{} were reserved", memory.size()));
  }
  if (work_tiles_.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max() / spec.heads)) {
    fail(ErrorCode::kUnsupported, fmt::format("an attention task has {} work tiles", work_tiles_.size()),
         "more than a grid holds", "Use more ranks.");
  }
  layout.work_tile_count = static_cast<std::int32_t>(work_tiles_.size());
  layout.gqa_tile_count = static_cast<std::int32_t>(gqa_tiles_.size());
  layout.cluster_ctas = cluster_ctas;
  layout.heads_per_gqa_tile = heads_of_head_tile;
  // An entry counts for all heads, or for those that share its block mask or key positions.
  layout.entry_heads = (shape.head_tiles == 1 ? spec.heads : spec.kv_heads) /
                       std::min(own_heads(spec), shape.head_tiles == 1 ? spec.heads : spec.kv_heads);
  if (work_tiles_.empty()) return layout;
  // The mask rows of one sequence have tiles all over it, so it is read as a whole, however short the rows are.
  const std::int64_t max_tiles = task.block_mask == nullptr ? order_.max_tiles() : longest_masked;
  layout.early_entries = order_.sort(shape.ctas / cluster_ctas, layout.entry_heads);

  const std::int64_t head_bytes = max_tiles * shape.key_tile * kv_head_bytes(spec);
  int kv_heads = spec.kv_heads;
  while (kv_heads > 1 && (kv_heads * head_bytes > shape.cache_bytes || spec.kv_heads % kv_heads != 0)) --kv_heads;
  layout.swizzle_heads = kv_heads * (shape.head_tiles == 1 ? spec.heads / spec.kv_heads : 1);
  if (own_heads(spec) > 1) layout.swizzle_heads = layout.entry_heads;
  // CTAs with different masks or positions don't read the same keys at the same time.
  layout.keep_pace =
      task.block_mask == nullptr && task.positions == nullptr && head_bytes > kFarBeyondCache * shape.cache_bytes;

  const auto copy = [&memory](std::size_t offset, const void* from, std::size_t bytes) {
    if (bytes > 0) std::memcpy(memory.data() + offset, from, bytes);
  };
  copy(layout.runs, runs_.data(), runs_.size() * sizeof(RunEntry));
  copy(layout.tiles, task.tiles.data(), task.tiles.size() * sizeof(TileEntry));
  if (task.positions != nullptr) {
    write_positions(task, shape, reinterpret_cast<std::int32_t*>(memory.data() + layout.positions));
  }
  auto* sources = reinterpret_cast<SourceEntry*>(memory.data() + layout.sources);
  for (std::size_t i = 0; i < far_sources; ++i) sources[i] = source_entry(task.sources[i]);
  auto* work_tiles = reinterpret_cast<WorkTile*>(memory.data() + layout.work_tiles);
  if (gqa_tiles_.empty()) {
    for (const SchedulerEntry& entry : order_.entries())
      *work_tiles++ = work_tiles_[static_cast<std::size_t>(entry.index)];
    return layout;
  }
  std::memset(memory.data() + layout.counters, 0, static_cast<std::size_t>(1 + shape.ctas) * sizeof(std::int32_t));
  copy(layout.work_tiles, work_tiles_.data(), work_tiles_.size() * sizeof(WorkTile));
  auto* gqa_tiles = reinterpret_cast<GqaPackedTile*>(memory.data() + layout.gqa_tiles);
  for (const SchedulerEntry& entry : order_.entries()) *gqa_tiles++ = gqa_tiles_[static_cast<std::size_t>(entry.index)];
  return layout;
}

// Work tiles for a block-sparse mask: the work tiles of a query block have the key runs of its row of the mask.

// collect() for a block-sparse mask. The work tiles of a query block have the runs of its row of the mask, and form a
// stretch. Heads with masks of their own follow each other, so that a swizzle group's work tiles read the keys of few
// heads.
std::int64_t WorkBuilder::collect_masked(const AttentionSpec& spec, const AttentionTask& task,
                                         const WorkTileShape& shape) {
  const BlockMask& block_mask = *task.block_mask;
  const bool all_rows = takes_all_rows(task);
  const int heads = block_mask.shape().heads;
  const std::int64_t token_bytes = kv_head_bytes(spec) * std::max(1, spec.kv_heads / heads);
  const int block = block_mask.shape().query_block;
  SwizzleGroup swizzle_group;
  std::int64_t longest = 0;
  for (int head = 0; head < heads; ++head) {
    auto next_run = task.key_runs.begin();
    for (auto run = task.queries.begin(); run != task.queries.end();) {
      const std::int32_t sequence = run->sequence;
      const std::int64_t key_length = task.key_lengths[static_cast<std::size_t>(sequence)];
      while (next_run != task.key_runs.end() && next_run->sequence < sequence) ++next_run;
      const auto first_run = next_run;
      std::int64_t tiles = 0;
      for (; next_run != task.key_runs.end() && next_run->sequence == sequence; ++next_run) tiles += next_run->tiles;
      longest = std::max(longest, tiles);
      const std::span<const KeyRun> keys(first_run, next_run);
      const std::int64_t bytes = tiles * shape.key_tile * token_bytes;
      swizzle_group.add(bytes, shape.cache_bytes);

      const Visibility visibility(spec.mask, key_length);
      std::int64_t masked_block = 0;
      for (bool has_mask_row = false; run != task.queries.end() && run->sequence == sequence; ++run) {
        const std::int64_t run_end = run->position + run->rows;
        for (std::int64_t begin = run->position; begin < run_end;) {
          const std::int64_t own_block = query_block_of(begin, block);
          if (!has_mask_row || own_block != masked_block) {
            if (has_mask_row) stretches_.push_back({work_tiles_.size(), swizzle_group.number});
            mask_tile_runs(spec, block_mask, static_cast<std::size_t>(sequence), head, own_block, shape.key_tile, keys);
            masked_block = own_block;
            has_mask_row = true;
          }
          WorkTile& work_tile = work_tiles_.emplace_back();
          work_tile.position = query_tile_begin(begin, shape.query_tile);
          const std::int64_t end = std::min({work_tile.position + shape.tile_rows, run_end, (own_block + 1) * block});
          work_tile.row = run->row + (work_tile.position - run->position);
          work_tile.key_length = key_length;
          work_tile.valid_row_begin = static_cast<std::int32_t>(begin - work_tile.position);
          work_tile.valid_row_end = static_cast<std::int32_t>(end - work_tile.position);
          work_tile.head = head * (spec.heads / heads);
          const std::int64_t last = shape.query_tile > 1 ? work_tile.position + shape.query_tile - 1 : end - 1;
          const TileRange range = tiles_of(visibility.keys(work_tile.position, last), shape.key_tile);
          if (!range.empty() && !masked_runs_.empty()) {
            SequenceRuns(std::span<const RunEntry>(runs_).subspan(first_masked_), masked_runs_)
                .assign(range, first_masked_, work_tile);
          }
          if (work_tile.tiles > 0) {
            const std::int64_t position =
                split_positions_[static_cast<std::size_t>(work_tile.run_begin) - first_masked_] + work_tile.first -
                runs_[static_cast<std::size_t>(work_tile.run_begin)].first;
            work_tile.split_position = static_cast<std::int32_t>(position % kTilesPerKvSplit);
            set_unmasked_tiles(visibility.common_keys(work_tile.position, last), shape.key_tile, work_tile);
          }
          if (work_tile.tiles == 0 && !all_rows) work_tiles_.pop_back();
          begin = end;
        }
      }
      stretches_.push_back({work_tiles_.size(), swizzle_group.number});
    }
  }
  return longest;
}

// Number of the work tile's KV tiles whose number in the sequence is smaller than `tile`.
std::int32_t WorkBuilder::tiles_before(const WorkTile& work_tile, std::int64_t tile) const {
  const auto begin = runs_.begin() + work_tile.run_begin;
  const auto after = std::partition_point(begin, begin + work_tile.runs,
                                          [tile](const RunEntry& run) { return run.first_tile < tile; });
  if (after == begin) return 0;
  const RunEntry& run = *std::prev(after);
  std::int64_t number = run.first + tile - run.first_tile;
  if (after != begin + work_tile.runs) number = std::min(number, after->first);
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(number - work_tile.first, 0, work_tile.tiles));
}

void WorkBuilder::set_unmasked_tiles(const KeyRange& common, int key_tile, WorkTile& work_tile) const {
  work_tile.unmasked_begin = tiles_before(work_tile, quotient(common.begin + key_tile - 1, key_tile));
  work_tile.unmasked_end = common.end < 0 ? 0 : tiles_before(work_tile, quotient(common.end, key_tile));
}

// Appends the runs of a query block's unmasked tiles that the task has to the table, and keeps them as KeyRuns with the
// positions of their first tiles among the mask's tiles.
void WorkBuilder::mask_tile_runs(const AttentionSpec& spec, const BlockMask& block_mask, std::size_t sequence, int head,
                                 std::int64_t query_block, int key_tile, std::span<const KeyRun> keys) {
  first_masked_ = runs_.size();
  masked_runs_.clear();
  split_positions_.clear();
  std::int64_t tiles = 0;
  auto run = keys.begin();
  for_each_masked_tile_run(block_mask, spec.mask, key_tile, sequence, head, query_block, [&](const MaskedTileRun& one) {
    while (run != keys.end() && run->first_tile + run->tiles <= one.tiles.begin) ++run;
    for (auto next = run; next != keys.end() && next->first_tile < one.tiles.end; ++next) {
      const std::int64_t begin = std::max(one.tiles.begin, next->first_tile);
      const std::int64_t end = std::min(one.tiles.end, next->first_tile + next->tiles);
      const std::int64_t table = next->table + begin - next->first_tile;
      runs_.push_back({begin, tiles, table});
      masked_runs_.push_back({next->sequence, begin, end - begin, table});
      split_positions_.push_back(one.ordinal + begin - one.tiles.begin);
      tiles += end - begin;
    }
  });
}

}  // namespace ringattn::cuda
