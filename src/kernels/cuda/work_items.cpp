// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/work_items.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/error.hpp"
#include "kernels/cuda/task_geometry.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::size_t kTableAlignment = 256;
// CTAs walk side by side unless they would let too many tiles pass without folding them: at most one more than alone in
// every kWorthwhile · units tiles, where units is the number of one CTA. The more units share a tile in one CTA
// already, the less there is to gain.
constexpr std::int64_t kWorthwhile = 16;
// CTAs keep pace where one head's K and V are more than so many times what the cache holds. On shorter walks they don't
// drift far apart.
constexpr std::int64_t kFarBeyondCache = 6;

// The task's map of tiles is copied into the table as it is.
static_assert(sizeof(TileEntry) == sizeof(KeyTile) && offsetof(TileEntry, source) == offsetof(KeyTile, source) &&
              offsetof(TileEntry, row) == offsetof(KeyTile, row));

std::size_t place(std::size_t& bytes, std::size_t size) {
  const std::size_t offset = bytes;
  bytes += (size + kTableAlignment - 1) / kTableAlignment * kTableAlignment;
  return offset;
}

TableLayout lay_out(std::size_t runs, std::size_t tiles, std::size_t sources, std::size_t items, std::size_t bundles,
                    std::int64_t ctas) {
  TableLayout layout;
  layout.runs = place(layout.bytes, runs * sizeof(RunEntry));
  layout.tiles = place(layout.bytes, tiles * sizeof(TileEntry));
  layout.sources = place(layout.bytes, sources * sizeof(SourceEntry));
  layout.items = place(layout.bytes, items * sizeof(WorkItem));
  layout.bundles = place(layout.bytes, bundles * sizeof(WorkBundle));
  layout.counters = place(layout.bytes, static_cast<std::size_t>(1 + ctas) * sizeof(std::int32_t));
  return layout;
}

// Every query run may begin and end inside of a tile.
std::int64_t most_items(const WorkShape& shape, const FoldLimits& limits) {
  return std::min(limits.rows, limits.rows / shape.item_rows + 2 * limits.query_runs);
}

// The first bundle of a sequence may have fewer units than the others.
std::int64_t most_bundles(const FoldSpec& spec, const WorkShape& shape, const FoldLimits& limits) {
  if (shape.units == 1) return 0;
  return most_items(shape, limits) * (spec.heads / spec.kv_heads) / shape.units + limits.sequences;
}

// The key runs of one sequence of a task.
class SequenceRuns {
 public:
  SequenceRuns(std::span<const RunEntry> entries, std::span<const KeyRun> runs) : entries_(entries), runs_(runs) {}

  // Sets which tiles the item folds: those in `range` that the task has. Leaves the item without tiles where there are
  // none.
  void assign(const TileRange& range, std::size_t first_entry, WorkItem& item) const {
    const auto ends_before = [](const KeyRun& run, std::int64_t tile) { return run.first_tile + run.tiles <= tile; };
    const auto begins_before = [](const KeyRun& run, std::int64_t tile) { return run.first_tile < tile; };
    const auto begin = std::lower_bound(runs_.begin(), runs_.end(), range.begin, ends_before);
    const auto end = std::lower_bound(begin, runs_.end(), range.end, begins_before);
    if (begin == end) return;
    const auto index = static_cast<std::size_t>(begin - runs_.begin());
    const auto last = static_cast<std::size_t>(end - runs_.begin() - 1);
    item.first_tile = std::max(range.begin, begin->first_tile);
    const std::int64_t skipped = item.first_tile - begin->first_tile;
    item.table = begin->table + skipped;
    item.first = entries_[index].first + skipped;
    item.tiles = static_cast<std::int32_t>(
        entries_[last].first + std::min(range.end - runs_[last].first_tile, runs_[last].tiles) - item.first);
    item.run_begin = static_cast<std::int32_t>(first_entry + index);
    item.runs = static_cast<std::int32_t>(last - index + 1);
  }

 private:
  std::span<const RunEntry> entries_;
  std::span<const KeyRun> runs_;
};

// Units of a sequence's first bundle, where the others have `most` each. It is the first one that has fewer where they
// don't come out even, because under a causal mask its walk is the shortest.
std::size_t units_of_first(std::size_t units, std::size_t most) { return units % most == 0 ? most : units % most; }

// Tiles [begin, end) of a sequence's runs, from the first to the last that one of several items folds.
struct Walk {
  std::int64_t begin = std::numeric_limits<std::int64_t>::max();
  std::int64_t end = 0;

  void add(const WorkItem& item) {
    if (item.tiles > 0) add(Walk{item.first, item.first + item.tiles});
  }
  void add(const Walk& other) {
    begin = std::min(begin, other.begin);
    end = std::max(end, other.end);
  }
  std::int64_t tiles() const { return std::max<std::int64_t>(0, end - begin); }
};

}  // namespace

SourceEntry source_entry(const KeySource& source) {
  SourceEntry entry{
      source.k.data,         source.v.data,        source.k.tokens,      source.k.token_stride, source.k.head_stride,
      source.v.token_stride, source.v.head_stride, source.k_page_stride, source.v_page_stride,  kNoPages};
  if (source.page_size > 0) entry.page_log = std::countr_zero(static_cast<std::uint64_t>(source.page_size));
  return entry;
}

std::size_t table_bytes(const FoldSpec& spec, const WorkShape& shape, const FoldLimits& limits) {
  const auto count = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  return lay_out(count(limits.key_runs), count(limits.tiles), count(limits.sources), count(most_items(shape, limits)),
                 count(most_bundles(spec, shape, limits)), shape.ctas)
      .bytes;
}

void WorkBuilder::reserve(const FoldSpec& spec, const WorkShape& shape, const FoldLimits& limits) {
  const auto items = static_cast<std::size_t>(most_items(shape, limits));
  const auto bundles = static_cast<std::size_t>(most_bundles(spec, shape, limits));
  items_.reserve(items);
  bundles_.reserve(bundles);
  order_.reserve(std::max(items, bundles));
  runs_.reserve(static_cast<std::size_t>(limits.key_runs));
  sequences_.reserve(static_cast<std::size_t>(limits.sequences));
}

void WorkBuilder::collect(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape) {
  items_.clear();
  sequences_.clear();
  runs_.clear();
  const bool all_rows = takes_all_rows(task);
  const std::int64_t token_bytes =
      std::int64_t{spec.kv_heads} * (spec.head_dim + spec.head_dim_v) * static_cast<std::int64_t>(size_of(spec.dtype));

  std::int32_t section = 0;
  std::int64_t section_bytes = 0;
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
    if (section_bytes > 0 && section_bytes + bytes > shape.cache_bytes) {
      ++section;
      section_bytes = 0;
    }
    section_bytes += bytes;

    const Visibility visibility(spec.mask, key_length);
    for (; run != task.queries.end() && run->sequence == sequence; ++run) {
      const std::int64_t run_end = run->position + run->rows;
      for (std::int64_t begin = run->position; begin < run_end;) {
        WorkItem& item = items_.emplace_back();  // in place: copies of what was just written are slow
        item.position = query_tile_begin(begin, shape.query_tile);
        const std::int64_t end = std::min(item.position + shape.item_rows, run_end);
        item.row = run->row + (item.position - run->position);
        item.key_length = key_length;
        item.slot_begin = static_cast<std::int32_t>(begin - item.position);
        item.slot_end = static_cast<std::int32_t>(end - item.position);
        // All rows of a query tile fold the same tiles; without query tiles a row folds what it sees.
        const std::int64_t last = shape.query_tile > 1 ? item.position + shape.query_tile - 1 : end - 1;
        const TileRange range = tiles_of(visibility.keys(item.position, last), shape.key_tile);
        if (!range.empty()) keys.assign(range, first_entry, item);
        if (item.tiles == 0 && !all_rows) items_.pop_back();
        begin = end;
      }
    }
    sequences_.push_back({items_.size(), section});
  }
}

// Makes the pieces: the items themselves, or bundles of `units` units.
void WorkBuilder::cut(const FoldSpec& spec, int units) {
  bundles_.clear();
  order_.clear();
  std::size_t first_item = 0;
  for (const Sequence& sequence : sequences_) {
    if (units > 1) {
      bundle(spec, units, first_item, sequence);
    } else {
      for (std::size_t i = first_item; i < sequence.end_item; ++i) {
        order_.add({sequence.section, items_[i].tiles, static_cast<std::int32_t>(i)});
      }
    }
    first_item = sequence.end_item;
  }
}

// Makes bundles of the items of one sequence, which are those from `first_item` on. An item's units, one for each query
// head of a KV head, follow each other, and then come the next item's: neighbours fold nearly the same tiles.
void WorkBuilder::bundle(const FoldSpec& spec, int units_of_bundle, std::size_t first_item, const Sequence& sequence) {
  const auto heads = static_cast<std::uint32_t>(spec.heads / spec.kv_heads);  // query heads of a KV head
  const auto units = static_cast<std::uint32_t>(sequence.end_item - first_item) * heads;
  const auto most = static_cast<std::uint32_t>(units_of_bundle);
  auto count = static_cast<std::uint32_t>(units_of_first(units, most));
  for (std::uint32_t unit = 0; unit < units; unit += count, count = most) {
    const std::size_t first = first_item + unit / heads;
    const std::size_t last = first_item + (unit + count - 1) / heads;
    WorkBundle& bundle = bundles_.emplace_back();
    bundle.item = static_cast<std::int32_t>(first);
    bundle.head = static_cast<std::int32_t>(unit % heads);
    bundle.units = static_cast<std::int32_t>(count);
    std::int64_t end = 0;
    for (std::size_t i = first; i <= last; ++i) {
      const WorkItem& item = items_[i];
      if (item.tiles == 0) continue;
      const std::int32_t run_end = std::max(item.run_begin + item.runs, bundle.run_begin + bundle.runs);
      if (end == 0 || item.first < bundle.first) {
        bundle.first = item.first;
        bundle.first_tile = item.first_tile;
        bundle.table = item.table;
        bundle.run_begin = item.run_begin;
      }
      bundle.runs = run_end - bundle.run_begin;
      end = std::max(end, item.first + item.tiles);
    }
    bundle.tiles = static_cast<std::int32_t>(end - bundle.first);
    order_.add({sequence.section, bundle.tiles, static_cast<std::int32_t>(bundles_.size() - 1)});
  }
}

// Whether CTAs that walk side by side would find enough to fold on the way: their walk covers the tiles of both, and
// each lets those pass that only the other one folds.
bool WorkBuilder::walks_pay(const FoldSpec& spec, const WorkShape& shape) const {
  const auto heads = static_cast<std::size_t>(spec.heads / spec.kv_heads);  // query heads of a KV head
  const auto of_cta = static_cast<std::size_t>(shape.units);
  const std::size_t most = of_cta * static_cast<std::size_t>(shape.walk_ctas);
  std::int64_t together = 0;  // tiles that all CTAs walk over, side by side
  std::int64_t alone = 0;     // the same where each walks alone
  std::size_t first_item = 0;
  for (const Sequence& sequence : sequences_) {
    const std::size_t units = (sequence.end_item - first_item) * heads;
    std::size_t count = units_of_first(units, most);
    for (std::size_t unit = 0; unit < units; unit += count, count = most) {
      Walk shared;
      for (std::size_t part = unit; part < unit + count; part += of_cta) {
        const std::size_t last = std::min(part + of_cta, unit + count) - 1;
        Walk own;
        for (std::size_t i = first_item + part / heads; i <= first_item + last / heads; ++i) own.add(items_[i]);
        alone += own.tiles();
        shared.add(own);
      }
      together += shape.walk_ctas * shared.tiles();
    }
    first_item = sequence.end_item;
  }
  const std::int64_t worthwhile = kWorthwhile * shape.units;
  return together * worthwhile <= alone * (worthwhile + 1);
}

TableLayout WorkBuilder::build(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape,
                               std::span<std::byte> memory) {
  collect(spec, task, shape);
  const std::int32_t walk_ctas = shape.walk_ctas > 1 && walks_pay(spec, shape) ? shape.walk_ctas : 1;
  cut(spec, shape.units * walk_ctas);
  const std::size_t far_sources = task.sources.size() > kNearSources ? task.sources.size() : 0;
  TableLayout layout =
      lay_out(runs_.size(), task.tiles.size(), far_sources, items_.size(), bundles_.size(), shape.ctas);
  if (layout.bytes > memory.size()) {
    fail(ErrorCode::kInternal, fmt::format("a fold task needs {} bytes of tables", layout.bytes),
         fmt::format("{} were reserved", memory.size()));
  }
  if (items_.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max() / spec.heads)) {
    fail(ErrorCode::kUnsupported, fmt::format("a fold task has {} items of work", items_.size()),
         "more than a grid holds", "Use more ranks.");
  }
  layout.item_count = static_cast<std::int32_t>(items_.size());
  layout.bundle_count = static_cast<std::int32_t>(bundles_.size());
  layout.walk_ctas = walk_ctas;
  if (items_.empty()) return layout;
  const std::int64_t most_tiles = order_.most_tiles();
  layout.early_count = order_.sort(shape.ctas / walk_ctas, shape.units == 1 ? spec.heads : spec.kv_heads);

  const std::int64_t head_bytes =
      most_tiles * shape.key_tile * (spec.head_dim + spec.head_dim_v) * static_cast<std::int64_t>(size_of(spec.dtype));
  int kv_heads = spec.kv_heads;
  while (kv_heads > 1 && (kv_heads * head_bytes > shape.cache_bytes || spec.kv_heads % kv_heads != 0)) --kv_heads;
  layout.section_heads = kv_heads * (spec.heads / spec.kv_heads);
  layout.keep_pace = head_bytes > kFarBeyondCache * shape.cache_bytes;

  const auto copy = [&memory](std::size_t offset, const void* from, std::size_t bytes) {
    if (bytes > 0) std::memcpy(memory.data() + offset, from, bytes);
  };
  copy(layout.runs, runs_.data(), runs_.size() * sizeof(RunEntry));
  copy(layout.tiles, task.tiles.data(), task.tiles.size() * sizeof(TileEntry));
  auto* sources = reinterpret_cast<SourceEntry*>(memory.data() + layout.sources);
  for (std::size_t i = 0; i < far_sources; ++i) sources[i] = source_entry(task.sources[i]);
  auto* items = reinterpret_cast<WorkItem*>(memory.data() + layout.items);
  if (bundles_.empty()) {
    for (const Piece& piece : order_.pieces()) *items++ = items_[static_cast<std::size_t>(piece.index)];
    return layout;
  }
  std::memset(memory.data() + layout.counters, 0, static_cast<std::size_t>(1 + shape.ctas) * sizeof(std::int32_t));
  copy(layout.items, items_.data(), items_.size() * sizeof(WorkItem));
  auto* bundles = reinterpret_cast<WorkBundle*>(memory.data() + layout.bundles);
  for (const Piece& piece : order_.pieces()) *bundles++ = bundles_[static_cast<std::size_t>(piece.index)];
  return layout;
}

}  // namespace ringattn::cuda
