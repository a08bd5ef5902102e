// SPDX-License-Identifier: Apache-2.0
// Work items where there are lists of key tiles: those of a query block have the runs of its list.
#include <algorithm>

#include "kernels/cuda/sequence_runs.hpp"
#include "kernels/cuda/task_geometry.hpp"
#include "kernels/cuda/work_items.hpp"

namespace ringattn::cuda {

// The same with lists of tiles. The items of a query block have the runs of its list, and are stretches by themselves.
// Heads with lists of their own come one after the other, so that a section's items read the keys of few heads.
std::int64_t WorkBuilder::collect_listed(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape) {
  const TileLists& lists = *task.lists;
  const bool all_rows = takes_all_rows(task);
  const int heads = lists.shape().heads;
  const std::int64_t token_bytes = kv_head_bytes(spec) * std::max(1, spec.kv_heads / heads);
  const int block = lists.shape().query_block;
  Section section;
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
      section.add(bytes, shape.cache_bytes);

      const Visibility visibility(spec.mask, key_length);
      std::int64_t listed_block = 0;
      for (bool listed = false; run != task.queries.end() && run->sequence == sequence; ++run) {
        const std::int64_t run_end = run->position + run->rows;
        for (std::int64_t begin = run->position; begin < run_end;) {
          const std::int64_t own_block = query_block_of(begin, block);
          if (!listed || own_block != listed_block) {
            if (listed) stretches_.push_back({items_.size(), section.number});
            list_runs(spec, lists, static_cast<std::size_t>(sequence), head, own_block, shape.key_tile, keys);
            listed_block = own_block;
            listed = true;
          }
          WorkItem& item = items_.emplace_back();
          item.position = query_tile_begin(begin, shape.query_tile);
          const std::int64_t end = std::min({item.position + shape.item_rows, run_end, (own_block + 1) * block});
          item.row = run->row + (item.position - run->position);
          item.key_length = key_length;
          item.slot_begin = static_cast<std::int32_t>(begin - item.position);
          item.slot_end = static_cast<std::int32_t>(end - item.position);
          item.head = head * (spec.heads / heads);
          const std::int64_t last = shape.query_tile > 1 ? item.position + shape.query_tile - 1 : end - 1;
          const TileRange range = tiles_of(visibility.keys(item.position, last), shape.key_tile);
          if (!range.empty() && !listed_.empty()) {
            SequenceRuns(std::span<const RunEntry>(runs_).subspan(first_listed_), listed_)
                .assign(range, first_listed_, item);
          }
          if (item.tiles > 0) {
            const std::int64_t place = places_[static_cast<std::size_t>(item.run_begin) - first_listed_] + item.first -
                                       runs_[static_cast<std::size_t>(item.run_begin)].first;
            item.place = static_cast<std::int32_t>(place % kGroupTiles);
            set_plain(visibility.common_keys(item.position, last), shape.key_tile, item);
          }
          if (item.tiles == 0 && !all_rows) items_.pop_back();
          begin = end;
        }
      }
      stretches_.push_back({items_.size(), section.number});
    }
  }
  return longest;
}

// How many of the item's tiles have a smaller number in the sequence than `tile`.
std::int32_t WorkBuilder::tiles_before(const WorkItem& item, std::int64_t tile) const {
  const auto begin = runs_.begin() + item.run_begin;
  const auto behind =
      std::partition_point(begin, begin + item.runs, [tile](const RunEntry& run) { return run.first_tile < tile; });
  if (behind == begin) return 0;
  const RunEntry& run = *std::prev(behind);
  std::int64_t number = run.first + tile - run.first_tile;
  if (behind != begin + item.runs) number = std::min(number, behind->first);
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(number - item.first, 0, item.tiles));
}

void WorkBuilder::set_plain(const KeyRange& common, int key_tile, WorkItem& item) const {
  item.plain_begin = tiles_before(item, quotient(common.begin + key_tile - 1, key_tile));
  item.plain_end = common.end < 0 ? 0 : tiles_before(item, quotient(common.end, key_tile));
}

// The runs of a query block's listed tiles that the task has: appends them to the table, and keeps them as runs of keys
// with their places.
void WorkBuilder::list_runs(const FoldSpec& spec, const TileLists& lists, std::size_t sequence, int head,
                            std::int64_t query_block, int key_tile, std::span<const KeyRun> keys) {
  first_listed_ = runs_.size();
  listed_.clear();
  places_.clear();
  std::int64_t tiles = 0;
  auto run = keys.begin();
  for_each_listed_run(lists, spec.mask, key_tile, sequence, head, query_block, [&](const ListedRun& one) {
    while (run != keys.end() && run->first_tile + run->tiles <= one.tiles.begin) ++run;
    for (auto next = run; next != keys.end() && next->first_tile < one.tiles.end; ++next) {
      const std::int64_t begin = std::max(one.tiles.begin, next->first_tile);
      const std::int64_t end = std::min(one.tiles.end, next->first_tile + next->tiles);
      const std::int64_t table = next->table + begin - next->first_tile;
      runs_.push_back({begin, tiles, table});
      listed_.push_back({next->sequence, begin, end - begin, table});
      places_.push_back(one.place + begin - one.tiles.begin);
      tiles += end - begin;
    }
  });
}

}  // namespace ringattn::cuda
