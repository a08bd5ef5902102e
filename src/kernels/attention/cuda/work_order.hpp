// SPDX-License-Identifier: Apache-2.0
// The order in which the entries of a task (work tiles or GQA-packed tiles) start, and for which heads.
//
// Entries whose K and V fit into the L2 cache together form an L2 swizzle group. The early entries come first. They are
// ordered by swizzle group of heads, then by swizzle group of entries. In a swizzle group the longest entry comes
// first, and an entry's heads follow each other. The late entries, which are short, come last, the longest first, each
// for all heads. The host sorts the entries (scheduler_order.hpp), and a kernel computes its entry with work_index().
#pragma once

#include "base/host_device.hpp"

namespace ringattn::cuda {

struct WorkIndex {
  int entry;
  int head;
};

// Returns the entry and head with number `index` in this order. The first `early_entries` entries are early, and a
// swizzle group has `swizzle_heads` of the `heads` heads. Heads are query heads, or KV heads if entries are gqa_tiles.
RINGATTN_HOST_DEVICE inline WorkIndex work_index(int early_entries, int heads, int swizzle_heads, int index) {
  const int early = early_entries * heads;
  if (index >= early) return {early_entries + (index - early) / heads, (index - early) % heads};
  const int swizzle_group_work = early_entries * swizzle_heads;
  const int in_swizzle_group = index % swizzle_group_work;
  return {in_swizzle_group / swizzle_heads,
          index / swizzle_group_work * swizzle_heads + in_swizzle_group % swizzle_heads};
}

}  // namespace ringattn::cuda
