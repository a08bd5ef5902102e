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
  std::int32_t index;  // of the work tile or gqa_tile

  bool operator<(const SchedulerEntry& other) const { return tiles > other.tiles; }  // the longest first
};

// Sorts the entries of a task. Reuses its vectors between tasks, so that sorting doesn't allocate after reserve().
class SchedulerOrder {
 public:
  void reserve(std::size_t entries);
  void clear() { entries_.clear(); }
  // Swizzle groups must ascend from entry to entry.
  void add(const SchedulerEntry& entry) { entries_.push_back(entry); }
  // KV tiles of the longest entry, 0 if there is none.
  std::int32_t max_tiles() const;
  // Sorts the entries and returns how many of them are early. `workers` CTAs, or CTA clusters, take entries, and each
  // entry is taken once for each of `heads` heads.
  std::int32_t sort(std::int64_t workers, std::int64_t heads);

  std::span<const SchedulerEntry> entries() const { return entries_; }

 private:
  std::int32_t move_late_entries_back(std::int64_t workers, std::int64_t heads);
  void sort_swizzle_group(std::span<SchedulerEntry> swizzle_group);

  std::vector<SchedulerEntry> entries_;
  std::vector<SchedulerEntry> unsorted_;
  std::vector<std::int32_t> counts_;  // number of entries by their tiles
};

}  // namespace ringattn::cuda
