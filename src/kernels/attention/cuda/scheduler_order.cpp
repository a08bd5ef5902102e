// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/cuda/scheduler_order.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace ringattn::cuda {

namespace {

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

}  // namespace ringattn::cuda
