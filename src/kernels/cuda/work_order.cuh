// SPDX-License-Identifier: Apache-2.0
// In which order a task's pieces (items, or bundles of them) and heads are folded, as WorkBuilder means it: first
// sections of heads, in each the early pieces, and of a piece the section's heads one after the other; then the late
// pieces, each for all heads.
#pragma once

#include "kernels/cuda/fold_params.hpp"

namespace ringattn::cuda {

struct WorkPlace {
  int piece;
  int head;
};

// The index-th of pieces × `heads`, in sections of `section_heads`.
__device__ __forceinline__ WorkPlace work_place(const FoldParams& p, int heads, int section_heads, int index) {
  const int early = p.early_count * heads;
  if (index >= early) return {p.early_count + (index - early) / heads, (index - early) % heads};
  const int section_work = p.early_count * section_heads;
  const int in_section = index % section_work;
  return {in_section / section_heads, index / section_work * section_heads + in_section % section_heads};
}

}  // namespace ringattn::cuda
