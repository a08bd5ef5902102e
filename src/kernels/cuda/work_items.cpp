// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/work_items.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/error.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::size_t kTableAlignment = 256;
// What is left for last: pieces of at most a quarter of the longest one, and of such work about half of it for each
// CTA, or for each pair that walks side by side.
constexpr std::int64_t kLastPiece = 4;
constexpr std::int64_t kLastWork = 2;
// CTAs walk side by side where, of so many tiles for each unit of a CTA, at most one more is walked over than alone:
// the more units share a tile in one CTA, the less there is to gain.
constexpr std::int64_t kWorthwhile = 16;
// The section of what is left for last.
constexpr std::int32_t kLast = std::numeric_limits<std::int32_t>::max();

// Walks over more than so many times the cache are long enough for CTAs to lose each other.
constexpr std::int64_t kFarBeyondCache = 6;

// Tile maps are copied as they are.
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

// Every run may begin and end inside a tile.
std::int64_t most_items(const WorkShape& shape, const FoldLimits& limits) {
  return std::min(limits.rows, limits.rows / shape.item_rows + 2 * limits.query_runs);
}

// The first bundle of a sequence may lack units.
std::int64_t most_bundles(const FoldSpec& spec, const WorkShape& shape, const FoldLimits& limits) {
  if (shape.units == 1) return 0;
  return most_items(shape, limits) * (spec.heads / spec.kv_heads) / shape.units + limits.sequences;
}

// Rows that fold nothing in a task are written all the same, unless their state stays as it is.
bool takes_all_rows(const FoldTask& task) { return task.finish != nullptr || (task.save && !task.resume); }

// The key runs of one sequence of a task.
class SequenceRuns {
 public:
  SequenceRuns(std::span<const RunEntry> entries, std::span<const KeyRun> runs) : entries_(entries), runs_(runs) {}

  // Sets which tiles the item folds: those of `range` that the task has.
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

// Where units don't come out even, it is the first bundle of `most` that lacks some: under a causal mask the shortest
// one.
std::size_t units_of_first(std::size_t units, std::size_t most) { return units % most == 0 ? most : units % most; }

// The tiles of items, from the first to the last.
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
  return {source.k.data,        source.v.data,         source.k.tokens,     source.k.token_stride,
          source.k.head_stride, source.v.token_stride, source.v.head_stride};
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
  unsorted_.reserve(std::max(items, bundles));
  places_.resize(4 * std::max(items, bundles));
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

// What is folded in a piece: items, or bundles of `units` units.
void WorkBuilder::cut(const FoldSpec& spec, int units) {
  bundles_.clear();
  order_.clear();
  std::size_t first_item = 0;
  for (const Sequence& sequence : sequences_) {
    if (units > 1) {
      bundle(spec, units, first_item, sequence);
    } else {
      for (std::size_t i = first_item; i < sequence.end_item; ++i) {
        order_.push_back({sequence.section, items_[i].tiles, static_cast<std::int32_t>(i)});
      }
    }
    first_item = sequence.end_item;
  }
}

// Bundles the items of one sequence, from first_item on, with all heads of a group: neighbours fold nearly the same
// tiles.
void WorkBuilder::bundle(const FoldSpec& spec, int units_of_bundle, std::size_t first_item, const Sequence& sequence) {
  const auto group = static_cast<std::uint32_t>(spec.heads / spec.kv_heads);
  const auto units = static_cast<std::uint32_t>(sequence.end_item - first_item) * group;
  const auto most = static_cast<std::uint32_t>(units_of_bundle);
  auto count = static_cast<std::uint32_t>(units_of_first(units, most));
  for (std::uint32_t unit = 0; unit < units; unit += count, count = most) {
    const std::size_t first = first_item + unit / group;
    const std::size_t last = first_item + (unit + count - 1) / group;
    WorkBundle& bundle = bundles_.emplace_back();
    bundle.item = static_cast<std::int32_t>(first);
    bundle.head = static_cast<std::int32_t>(unit % group);
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
    order_.push_back({sequence.section, bundle.tiles, static_cast<std::int32_t>(bundles_.size() - 1)});
  }
}

// Whether CTAs that walk side by side would find enough to fold on the way.
bool WorkBuilder::walks_pay(const FoldSpec& spec, const WorkShape& shape) const {
  const auto group = static_cast<std::size_t>(spec.heads / spec.kv_heads);
  const auto of_cta = static_cast<std::size_t>(shape.units);
  const std::size_t most = of_cta * static_cast<std::size_t>(shape.walk_ctas);
  std::int64_t together = 0;  // tiles that CTAs walk over
  std::int64_t alone = 0;
  std::size_t first_item = 0;
  for (const Sequence& sequence : sequences_) {
    const std::size_t units = (sequence.end_item - first_item) * group;
    std::size_t count = units_of_first(units, most);
    for (std::size_t unit = 0; unit < units; unit += count, count = most) {
      Walk shared;
      for (std::size_t part = unit; part < unit + count; part += of_cta) {
        const std::size_t last = std::min(part + of_cta, unit + count) - 1;
        Walk own;
        for (std::size_t i = first_item + part / group; i <= first_item + last / group; ++i) own.add(items_[i]);
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

// CTAs run out of work when the last pieces of all are folded. So those should be short, and there should be enough of
// them to make up for the differences that longer ones leave: short pieces of all sections, but only about as many as
// that takes, as they are not folded by what the cache holds. `most`: tiles of the longest piece; `workers`: CTAs, or
// clusters of them, that take pieces. Returns how many pieces come before.
std::int32_t WorkBuilder::leave_for_last(std::int64_t workers, std::int64_t heads, std::int64_t most) {
  const std::int64_t longest = std::min(most / kLastPiece, static_cast<std::int64_t>(places_.size()) - 1);
  std::fill_n(places_.begin(), longest + 1, 0);
  for (const Order& order : order_) {
    if (order.tiles <= longest) ++places_[static_cast<std::size_t>(order.tiles)];
  }
  std::int64_t room = workers * most / kLastWork;
  std::int64_t tiles = -1;  // of the longest that are left
  while (tiles < longest && room >= 0) {
    ++tiles;
    room -= tiles * places_[static_cast<std::size_t>(tiles)] * heads;
  }
  unsorted_.clear();
  std::size_t early = 0;
  for (const Order& order : order_) {
    if (order.tiles > tiles) {
      order_[early++] = order;
    } else {
      unsorted_.push_back({kLast, order.tiles, order.index});
    }
  }
  std::ranges::copy(unsorted_, order_.begin() + static_cast<std::ptrdiff_t>(early));
  return static_cast<std::int32_t>(early);
}

// Sections follow each other; in each the longest pieces come first: what starts last should be short.
void WorkBuilder::sort() {
  for (auto begin = order_.begin(); begin != order_.end();) {
    const std::int32_t section = begin->section;
    const auto end = std::find_if(begin, order_.end(), [&](const Order& order) { return order.section != section; });
    sort_section({begin, end});
    begin = end;
  }
}

void WorkBuilder::sort_section(std::span<Order> section) {
  // Most are in order already, or, under a causal mask, in order from behind.
  if (std::is_sorted(section.begin(), section.end())) return;
  if (std::is_sorted(section.rbegin(), section.rend())) {
    std::reverse(section.begin(), section.end());
    return;
  }
  const auto by_tiles = [](const Order& a, const Order& b) { return a.tiles < b.tiles; };
  const auto most = static_cast<std::size_t>(std::max_element(section.begin(), section.end(), by_tiles)->tiles);
  if (most >= places_.size()) {
    std::sort(section.begin(), section.end(), [](const Order& a, const Order& b) {
      if (a < b || b < a) return a < b;
      return a.index < b.index;
    });
    return;
  }
  // As many lengths as pieces, about: each piece's place is counted.
  std::fill_n(places_.begin(), most + 1, 0);
  for (const Order& order : section) ++places_[most - static_cast<std::size_t>(order.tiles)];
  std::exclusive_scan(places_.begin(), places_.begin() + static_cast<std::ptrdiff_t>(most) + 1, places_.begin(), 0);
  unsorted_.assign(section.begin(), section.end());
  for (std::size_t i = 0; i < section.size(); ++i) {
    std::int32_t& place = places_[most - static_cast<std::size_t>(unsorted_[i].tiles)];
    section[static_cast<std::size_t>(place++)] = unsorted_[i];
  }
}

void TaskGeometry::reserve(const FoldLimits& limits) {
  forget();
  queries_.reserve(static_cast<std::size_t>(limits.query_runs));
  key_lengths_.reserve(static_cast<std::size_t>(limits.sequences));
  key_runs_.reserve(static_cast<std::size_t>(limits.key_runs));
  tiles_.reserve(static_cast<std::size_t>(limits.tiles));
}

void TaskGeometry::remember(const FoldTask& task) {
  forget();
  if (task.sources.size() > kNearSources) return;
  all_rows_ = takes_all_rows(task);
  rows_ = task.q.tokens;
  queries_.assign(task.queries.begin(), task.queries.end());
  key_lengths_.assign(task.key_lengths.begin(), task.key_lengths.end());
  key_runs_.assign(task.key_runs.begin(), task.key_runs.end());
  tiles_.assign(task.tiles.begin(), task.tiles.end());
  known_ = true;
}

bool TaskGeometry::fits(const FoldTask& task) const {
  // Blocks of a plan differ in their keys, so those are looked at first.
  return known_ && task.sources.size() <= kNearSources && all_rows_ == takes_all_rows(task) && rows_ == task.q.tokens &&
         std::ranges::equal(key_runs_, task.key_runs) && std::ranges::equal(tiles_, task.tiles) &&
         std::ranges::equal(queries_, task.queries) && std::ranges::equal(key_lengths_, task.key_lengths);
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
  std::int64_t most_tiles = 0;
  for (const Order& order : order_) most_tiles = std::max<std::int64_t>(most_tiles, order.tiles);
  layout.early_count =
      leave_for_last(shape.ctas / walk_ctas, shape.units == 1 ? spec.heads : spec.kv_heads, most_tiles);
  sort();

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
    for (const Order& order : order_) *items++ = items_[static_cast<std::size_t>(order.index)];
    return layout;
  }
  std::memset(memory.data() + layout.counters, 0, static_cast<std::size_t>(1 + shape.ctas) * sizeof(std::int32_t));
  copy(layout.items, items_.data(), items_.size() * sizeof(WorkItem));
  auto* bundles = reinterpret_cast<WorkBundle*>(memory.data() + layout.bundles);
  for (const Order& order : order_) *bundles++ = bundles_[static_cast<std::size_t>(order.index)];
  return layout;
}

}  // namespace ringattn::cuda
