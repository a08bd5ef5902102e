// SPDX-License-Identifier: Apache-2.0
// In which order a task's pieces (items, or bundles of them) and heads are folded, as WorkBuilder means it: first
// sections of heads, in each the early pieces, and of a piece the section's heads one after the other; then the late
// pieces, each for all heads.
#pragma once

#include "base/host_device.hpp"

namespace ringattn::cuda {

struct WorkPlace {
  int piece;
  int head;
};

// The index-th of pieces × `heads`, in sections of `section_heads`.
RINGATTN_HOST_DEVICE inline WorkPlace work_place(int early_count, int heads, int section_heads, int index) {
  const int early = early_count * heads;
  if (index >= early) return {early_count + (index - early) / heads, (index - early) % heads};
  const int section_work = early_count * section_heads;
  const int in_section = index % section_work;
  return {in_section / section_heads, index / section_work * section_heads + in_section % section_heads};
}

}  // namespace ringattn::cuda
