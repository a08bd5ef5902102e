// SPDX-License-Identifier: Apache-2.0
// Partition of a range of heads into head blocks that share B and C. Used by sm80 and sm90 SSM kernels.
#pragma once

#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

// The heads of a CTA, all in one group.
struct HeadBlock {
  int first = 0;
  int count = 0;
  int group = 0;
};

// Calls visit(block) for the head blocks of up to `max_heads` heads in the range, until it returns true.
template <class Visit>
__host__ __device__ inline void visit_head_blocks(const SsmParams& p, int max_heads, Visit visit) {
  const int end = p.first_head + p.head_count;
  for (int head = p.first_head; head < end;) {
    const int group = head / p.group_heads;
    int last = head + max_heads;
    if (last > (group + 1) * p.group_heads) last = (group + 1) * p.group_heads;
    if (last > end) last = end;
    if (visit(HeadBlock{head, last - head, group})) return;
    head = last;
  }
}

inline int head_blocks(const SsmParams& p, int max_heads) {
  int blocks = 0;
  visit_head_blocks(p, max_heads, [&](const HeadBlock&) {
    ++blocks;
    return false;
  });
  return blocks;
}

__device__ inline HeadBlock head_block(const SsmParams& p, int max_heads, int nth) {
  HeadBlock found;
  visit_head_blocks(p, max_heads, [&](const HeadBlock& block) {
    found = block;
    return nth-- == 0;
  });
  return found;
}

}  // namespace ringattn::cuda
