// SPDX-License-Identifier: Apache-2.0
// Sorts the entries of a task into the order that work_order.hpp describes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ringattn::cuda {

struct SchedulerEntry {
  std::int32_t swizzle_group;
  std::int32_t tiles;
  std::int32_t index;  // of the work_tile or the gqa_tile

  bool operator<(const SchedulerEntry& other) const { return tiles > other.tiles; }  // the longest first
};

// Sorts the entries of a task. Keeps its lists between tasks, so that sorting allocates nothing once they have
// new_lengths.
class SchedulerOrder {
 public:
  void reserve(std::size_t entries);
  void clear() { entries_.clear(); }
  // Sections ascend from entry to entry.
  void add(const SchedulerEntry& entry) { entries_.push_back(entry); }
  // Tiles of the longest entry, 0 where there is none.
  std::int32_t max_tiles() const;
  // Brings the entries into their order and returns how many of them are early. `workers` CTAs, or pairs of CTAs that
  // walk side by side, take entries, and each entry is taken once for each of `heads` heads.
  std::int32_t sort(std::int64_t workers, std::int64_t heads);

  std::span<const SchedulerEntry> entries() const { return entries_; }

 private:
  std::int32_t move_late_entries_back(std::int64_t workers, std::int64_t heads);
  void sort_swizzle_group(std::span<SchedulerEntry> swizzle_group);

  std::vector<SchedulerEntry> entries_;
  std::vector<SchedulerEntry> unsorted_;
  std::vector<std::int32_t> counts_;  // of entries by their tiles
};

}  // namespace ringattn::cuda
