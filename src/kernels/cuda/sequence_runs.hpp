// SPDX-License-Identifier: Apache-2.0
// Which of a task's tiles a work item folds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cuda/fold_params.hpp"
#include "kernels/fold.hpp"

namespace ringattn::cuda {

// The key runs of one sequence of a task, or of one list of it.
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

}  // namespace ringattn::cuda
