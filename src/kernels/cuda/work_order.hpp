// SPDX-License-Identifier: Apache-2.0
// In which order the entries of a task (work_tiles, or gqa_tiles of them) start, for which heads.
//
// Pieces whose K and V fit into the L2 cache together form a swizzle_group. First come the early entries: swizzle_group
// by swizzle_group of heads, in each of those swizzle_group by swizzle_group of entries, the longest entry of a
// swizzle_group first, and of a entry the swizzle_group's heads one after the other. Then come the late entries, which
// are short, the longest first, each for all heads. The host sorts the entries (scheduler_order.hpp), and a kernel
// finds its place in the order (work_index()).
#pragma once

#include "base/host_device.hpp"

namespace ringattn::cuda {

struct WorkIndex {
  int entry;
  int head;
};

// Which entry and which of `heads` heads come as number `index`, where the first `early_entries` entries are early and
// a swizzle_group has `swizzle_heads` heads. Heads are query heads, or KV heads where entries are gqa_tiles.
RINGATTN_HOST_DEVICE inline WorkIndex work_index(int early_entries, int heads, int swizzle_heads, int index) {
  const int early = early_entries * heads;
  if (index >= early) return {early_entries + (index - early) / heads, (index - early) % heads};
  const int swizzle_group_work = early_entries * swizzle_heads;
  const int in_swizzle_group = index % swizzle_group_work;
  return {in_swizzle_group / swizzle_heads,
          index / swizzle_group_work * swizzle_heads + in_swizzle_group % swizzle_heads};
}

}  // namespace ringattn::cuda
