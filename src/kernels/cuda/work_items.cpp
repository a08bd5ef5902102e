// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/work_items.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>

#include "base/error.hpp"
#include "kernels/cuda/sequence_runs.hpp"
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

TableLayout lay_out(std::size_t runs, std::size_t tiles, std::size_t positions, std::size_t sources, std::size_t items,
                    std::size_t bundles, std::int64_t ctas) {
  TableLayout layout;
  layout.runs = place(layout.bytes, runs * sizeof(RunEntry));
  layout.tiles = place(layout.bytes, tiles * sizeof(TileEntry));
  layout.positions = place(layout.bytes, positions * sizeof(std::int32_t));
  layout.sources = place(layout.bytes, sources * sizeof(SourceEntry));
  layout.items = place(layout.bytes, items * sizeof(WorkItem));
  layout.bundles = place(layout.bytes, bundles * sizeof(WorkBundle));
  layout.counters = place(layout.bytes, static_cast<std::size_t>(1 + ctas) * sizeof(std::int32_t));
  return layout;
}

// Heads that have lists of tiles or of positions, and so items, of their own.
int own_heads(const FoldSpec& spec) { return std::max({1, spec.lists.heads, spec.positions}); }

// Query blocks that a task's rows lie in: every run may begin and end inside of one.
std::int64_t most_blocks(const FoldSpec& spec, const FoldLimits& limits) {
  return limits.rows / spec.lists.query_block + 2 * limits.query_runs;
}

// Every query run, and every query block, may begin and end inside of a tile.
std::int64_t most_items(const FoldSpec& spec, const WorkShape& shape, const FoldLimits& limits) {
  std::int64_t items = limits.rows / shape.item_rows + 2 * limits.query_runs;
  if (spec.lists.any() && shape.query_tile == 1) items += most_blocks(spec, limits);
  return std::min(limits.rows, items) * own_heads(spec);
}

// Query heads of one KV head that an item is folded for.
int unit_heads(const FoldSpec& spec) { return spec.lists.heads > spec.kv_heads ? 1 : spec.heads / spec.kv_heads; }

// The first bundle of a sequence, or of a list of tiles or of positions, may have fewer units than the others.
std::int64_t most_bundles(const FoldSpec& spec, const WorkShape& shape, const FoldLimits& limits) {
  if (shape.units == 1) return 0;
  const std::int64_t stretches = (spec.lists.any() ? most_blocks(spec, limits) : limits.sequences) * own_heads(spec);
  return most_items(spec, shape, limits) * unit_heads(spec) / shape.units + stretches;
}

// A list's runs of tiles stand in the table once for each query block, a sequence's once for each list of positions.
std::int64_t most_runs(const FoldSpec& spec, const FoldLimits& limits) {
  return spec.lists.any() ? limits.list_runs : limits.key_runs * own_heads(spec);
}

// Positions in the table, of so many tiles.
std::int64_t positions_of_tiles(const FoldSpec& spec, const WorkShape& shape, std::int64_t tiles) {
  return tiles * spec.positions * shape.key_tile;
}

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

std::int64_t kv_head_bytes(const FoldSpec& spec) {
  return std::int64_t{spec.head_dim + spec.head_dim_v} * static_cast<std::int64_t>(size_of(spec.dtype));
}

SourceEntry source_entry(const KeySource& source) {
  SourceEntry entry{
      source.k.data,         source.v.data,        source.k.tokens,      source.k.token_stride, source.k.head_stride,
      source.v.token_stride, source.v.head_stride, source.k_page_stride, source.v_page_stride,  kNoPages};
  if (source.page_size > 0) entry.page_log = std::countr_zero(static_cast<std::uint64_t>(source.page_size));
  return entry;
}

std::size_t table_bytes(const FoldSpec& spec, const WorkShape& shape, const FoldLimits& limits) {
  const auto count = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  return lay_out(count(most_runs(spec, limits)), count(limits.tiles),
                 count(positions_of_tiles(spec, shape, limits.tiles)), count(limits.sources),
                 count(most_items(spec, shape, limits)), count(most_bundles(spec, shape, limits)), shape.ctas)
      .bytes;
}

void WorkBuilder::reserve(const FoldSpec& spec, const WorkShape& shape, const FoldLimits& limits) {
  const auto items = static_cast<std::size_t>(most_items(spec, shape, limits));
  const auto bundles = static_cast<std::size_t>(most_bundles(spec, shape, limits));
  items_.reserve(items);
  bundles_.reserve(bundles);
  order_.reserve(std::max(items, bundles));
  runs_.reserve(static_cast<std::size_t>(most_runs(spec, limits)));
  stretches_.reserve(spec.lists.any() ? items : static_cast<std::size_t>(limits.sequences * own_heads(spec)));
}

// Heads with positions of their own come one after the other, so that a section's items read the keys of few heads.
void WorkBuilder::collect(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape) {
  Section section;
  for (int list = 0; list < std::max(1, spec.positions); ++list) collect_list(spec, task, shape, list, section);
}

void WorkBuilder::collect_list(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape, int list,
                               Section& section) {
  const bool all_rows = takes_all_rows(task);
  const int lists = std::max(1, spec.positions);
  const std::int64_t token_bytes = spec.kv_heads / lists * kv_head_bytes(spec);

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
    section.add(bytes, shape.cache_bytes);

    const Visibility visibility(spec.mask, key_length);
    std::optional<PositionedVisibility> positioned;
    if (task.positions != nullptr) {
      positioned.emplace(spec.mask, task.positions->of(static_cast<std::size_t>(sequence), list));
    }
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
        item.head = list * (spec.heads / lists);
        item.position_list = list;
        const KeyRange seen = positioned ? positioned->keys(item.position, last) : visibility.keys(item.position, last);
        const TileRange range = tiles_of(seen, shape.key_tile);
        if (!range.empty()) keys.assign(range, first_entry, item);
        item.place = static_cast<std::int32_t>(item.first_tile % kGroupTiles);
        if (positioned && item.tiles > 0) {
          set_plain(positioned->common_keys(item.position, last), shape.key_tile, item);
        }
        if (item.tiles == 0 && !all_rows) items_.pop_back();
        begin = end;
      }
    }
    stretches_.push_back({items_.size(), section.number});
  }
}

// Writes the positions of the keys of all tiles that the task has, which lie as its map does.
void WorkBuilder::write_positions(const FoldTask& task, const WorkShape& shape, std::int32_t* positions) {
  const int lists = task.positions->heads();
  for (const KeyRun& run : task.key_runs) {
    for (int list = 0; list < lists; ++list) {
      const auto of_keys = task.positions->of(static_cast<std::size_t>(run.sequence), list);
      for (std::int64_t tile = 0; tile < run.tiles; ++tile) {
        std::int32_t* const to = positions + ((run.table + tile) * lists + list) * shape.key_tile;
        const auto first = static_cast<std::size_t>((run.first_tile + tile) * shape.key_tile);
        const std::size_t count = std::min(of_keys.size() - first, static_cast<std::size_t>(shape.key_tile));
        std::fill(std::copy_n(of_keys.begin() + static_cast<std::ptrdiff_t>(first), count, to), to + shape.key_tile,
                  kNoPosition);
      }
    }
  }
}

// Makes the pieces: the items themselves, or bundles of `units` units.
void WorkBuilder::cut(int unit_heads, int units) {
  bundles_.clear();
  order_.clear();
  std::size_t first_item = 0;
  for (const Stretch& stretch : stretches_) {
    if (units > 1) {
      bundle(unit_heads, units, first_item, stretch);
    } else {
      for (std::size_t i = first_item; i < stretch.end_item; ++i) {
        order_.add({stretch.section, items_[i].tiles, static_cast<std::int32_t>(i)});
      }
    }
    first_item = stretch.end_item;
  }
}

// Makes bundles of the items of one stretch, which are those from `first_item` on. An item's units, one for each query
// head of a KV head, follow each other, and then come the next item's: neighbours fold nearly the same tiles.
void WorkBuilder::bundle(int unit_heads, int units_of_bundle, std::size_t first_item, const Stretch& stretch) {
  const auto heads = static_cast<std::uint32_t>(unit_heads);
  const auto units = static_cast<std::uint32_t>(stretch.end_item - first_item) * heads;
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
    order_.add({stretch.section, bundle.tiles, static_cast<std::int32_t>(bundles_.size() - 1)});
  }
}

// Whether CTAs that walk side by side would find enough to fold on the way: their walk covers the tiles of both, and
// each lets those pass that only the other one folds.
bool WorkBuilder::walks_pay(int unit_heads, const WorkShape& shape) const {
  const auto heads = static_cast<std::size_t>(unit_heads);
  const auto of_cta = static_cast<std::size_t>(shape.units);
  const std::size_t most = of_cta * static_cast<std::size_t>(shape.walk_ctas);
  std::int64_t together = 0;  // tiles that all CTAs walk over, side by side
  std::int64_t alone = 0;     // the same where each walks alone
  std::size_t first_item = 0;
  for (const Stretch& stretch : stretches_) {
    const std::size_t units = (stretch.end_item - first_item) * heads;
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
    first_item = stretch.end_item;
  }
  const std::int64_t worthwhile = kWorthwhile * shape.units;
  return together * worthwhile <= alone * (worthwhile + 1);
}

TableLayout WorkBuilder::build(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape,
                               std::span<std::byte> memory) {
  items_.clear();
  stretches_.clear();
  runs_.clear();
  std::int64_t longest_listed = 0;
  if (task.lists == nullptr) {
    collect(spec, task, shape);
  } else {
    longest_listed = collect_listed(spec, task, shape);
  }
  const int heads_of_unit = unit_heads(spec);
  const std::int32_t walk_ctas = shape.walk_ctas > 1 && walks_pay(heads_of_unit, shape) ? shape.walk_ctas : 1;
  cut(heads_of_unit, shape.units * walk_ctas);
  const std::size_t far_sources = task.sources.size() > kNearSources ? task.sources.size() : 0;
  const auto tiles = static_cast<std::int64_t>(task.tiles.size()) / task.pieces;
  TableLayout layout =
      lay_out(runs_.size(), task.tiles.size(), static_cast<std::size_t>(positions_of_tiles(spec, shape, tiles)),
              far_sources, items_.size(), bundles_.size(), shape.ctas);
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
  layout.unit_heads = heads_of_unit;
  // A piece counts for all heads, or for those that share its lists.
  layout.piece_heads = (shape.units == 1 ? spec.heads : spec.kv_heads) /
                       std::min(own_heads(spec), shape.units == 1 ? spec.heads : spec.kv_heads);
  if (items_.empty()) return layout;
  // Lists of one sequence name tiles all over it, so that it is read as a whole, however short they are.
  const std::int64_t most_tiles = task.lists == nullptr ? order_.most_tiles() : longest_listed;
  layout.early_count = order_.sort(shape.ctas / walk_ctas, layout.piece_heads);

  const std::int64_t head_bytes = most_tiles * shape.key_tile * kv_head_bytes(spec);
  int kv_heads = spec.kv_heads;
  while (kv_heads > 1 && (kv_heads * head_bytes > shape.cache_bytes || spec.kv_heads % kv_heads != 0)) --kv_heads;
  layout.section_heads = kv_heads * (shape.units == 1 ? spec.heads / spec.kv_heads : 1);
  if (own_heads(spec) > 1) layout.section_heads = layout.piece_heads;
  // CTAs with lists of their own don't read the same keys at the same time.
  layout.keep_pace =
      task.lists == nullptr && task.positions == nullptr && head_bytes > kFarBeyondCache * shape.cache_bytes;

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
