// SPDX-License-Identifier: Apache-2.0
// In which order the pieces of a task (items, or bundles of them) start, for which heads.
//
// Pieces whose K and V fit into the L2 cache together form a section. First come the early pieces: section by section
// of heads, in each of those section by section of pieces, the longest piece of a section first, and of a piece the
// section's heads one after the other. Then come the late pieces, which are short, the longest first, each for all
// heads. The host sorts the pieces (piece_order.hpp), and a kernel finds its place in the order (work_place()).
#pragma once

#include "base/host_device.hpp"

namespace ringattn::cuda {

struct WorkPlace {
  int piece;
  int head;
};

// Which piece and which of `heads` heads come as number `index`, where the first `early_count` pieces are early and a
// section has `section_heads` heads. Heads are query heads, or KV heads where pieces are bundles.
RINGATTN_HOST_DEVICE inline WorkPlace work_place(int early_count, int heads, int section_heads, int index) {
  const int early = early_count * heads;
  if (index >= early) return {early_count + (index - early) / heads, (index - early) % heads};
  const int section_work = early_count * section_heads;
  const int in_section = index % section_work;
  return {in_section / section_heads, index / section_work * section_heads + in_section % section_heads};
}

}  // namespace ringattn::cuda
