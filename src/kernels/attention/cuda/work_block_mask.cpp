// SPDX-License-Identifier: Apache-2.0
// Work tiles for a block-sparse mask: the work tiles of a query block have the key runs of its row of the mask.
#include <algorithm>

#include "kernels/attention/cuda/sequence_runs.hpp"
#include "kernels/attention/cuda/task_geometry.hpp"
#include "kernels/attention/cuda/work_tiles.hpp"

namespace ringattn::cuda {

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
