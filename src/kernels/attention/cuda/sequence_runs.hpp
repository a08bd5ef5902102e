// SPDX-License-Identifier: Apache-2.0
// Finds which of a task's KV tiles a work tile attends to.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/attention/attention.hpp"
#include "kernels/attention/cuda/attention_params.hpp"

namespace ringattn::cuda {

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

}  // namespace ringattn::cuda
