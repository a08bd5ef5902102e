// SPDX-License-Identifier: Apache-2.0
// Assigns the dim blocks of a range of heads to CTAs, in launch order. A CTA has three dim blocks, or two if the number
// of dim blocks is not a multiple of three or if that shortens the last wave. An SM runs one CTA at a time. CTAs of two
// take less time, so they come last. The partition does not affect bits.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::sm90 {

// A dim block is 64 dims of a head, which one warpgroup computes. The dim blocks of a CTA share B and C.
inline constexpr int kDimBlockDims = 64;
inline constexpr int kDimBlocksPerCta = 3;

// The partition of one segment.
struct DimBlockPartition {
  std::int32_t dim_blocks = 1;  // per head
  std::int32_t max_pairs = 0;   // max. CTAs of two per group, beyond the remainder
  std::int32_t threes = 0;      // CTAs of three dim blocks, over all groups
  std::int32_t shorts = 0;      // CTAs of two dim blocks, or of a group's only one
};

// The partition of one group's dim blocks: CTAs of three first, then CTAs of two.
struct DimBlockCut {
  int threes;
  int shorts;
};
__host__ __device__ constexpr DimBlockCut cut_dim_blocks(int dim_blocks, int max_pairs) {
  if (dim_blocks == 1) return {0, 1};
  const int pairs = 2 * dim_blocks % 3;  // minimum; more come in steps of three
  const int possible = max_pairs < dim_blocks / 2 ? max_pairs : dim_blocks / 2;
  const int more = possible > pairs ? (possible - pairs) / 3 * 3 : 0;
  return {(dim_blocks - 2 * (pairs + more)) / 3, pairs + more};
}

// Calls visit(first dim block, dim blocks, group) for the part of each group that is in the range, until it returns
// true.
template <class Visit>
__host__ __device__ inline void visit_group_dim_blocks(const cuda::SsmParams& p, int dim_blocks, Visit visit) {
  const int end = p.first_head + p.head_count;
  for (int head = p.first_head; head < end;) {
    const int group = head / p.group_heads;
    const int group_end = (group + 1) * p.group_heads < end ? (group + 1) * p.group_heads : end;
    if (visit(head * dim_blocks, (group_end - head) * dim_blocks, group)) return;
    head = group_end;
  }
}

// The segment of a CTA, among those of the launch, and the CTA's dim blocks.
struct DimBlockCta {
  std::int64_t segment;
  cuda::HeadBlock block;
};
__host__ __device__ inline DimBlockCta dim_block_cta(const cuda::SsmParams& p, const DimBlockPartition& blocks,
                                                     int cta) {
  const int threes = blocks.threes * p.segments;
  const bool is_short = cta >= threes;
  const int among = is_short ? cta - threes : cta;
  const int in_segment = is_short ? blocks.shorts : blocks.threes;
  int nth = among % in_segment;
  DimBlockCta cta_work{among / in_segment, {}};
  visit_group_dim_blocks(p, blocks.dim_blocks, [&](int first, int dim_blocks, int group) {
    const DimBlockCut cut = cut_dim_blocks(dim_blocks, blocks.max_pairs);
    const int here = is_short ? cut.shorts : cut.threes;
    if (nth >= here) {
      nth -= here;
      return false;
    }
    const int before = is_short ? kDimBlocksPerCta * cut.threes + 2 * nth : kDimBlocksPerCta * nth;
    const int left = dim_blocks - before;
    const int max_count = is_short ? 2 : kDimBlocksPerCta;
    cta_work.block = {first + before, left < max_count ? left : max_count, group};
    return true;
  });
  return cta_work;
}

inline DimBlockPartition count_blocks(const cuda::SsmParams& p, int dim_blocks, int max_pairs) {
  DimBlockPartition blocks{dim_blocks, max_pairs, 0, 0};
  visit_group_dim_blocks(p, dim_blocks, [&](int, int of_group, int) {
    const DimBlockCut cut = cut_dim_blocks(of_group, max_pairs);
    blocks.threes += cut.threes;
    blocks.shorts += cut.shorts;
    return false;
  });
  return blocks;
}

// Estimated end of a launch. The time of a CTA is its number of dim blocks plus one, for the work that they share.
inline std::int64_t end_of_launch(const DimBlockPartition& blocks, std::int64_t segments,
                                  std::int64_t multiprocessors) {
  constexpr std::int64_t kThree = 4;
  constexpr std::int64_t kShort = 3;
  const std::int64_t threes = blocks.threes * segments;
  const std::int64_t shorts = blocks.shorts * segments;
  // When the SMs without a last CTA of three are done with these; `late` SMs have one more.
  const std::int64_t first = threes / multiprocessors * kThree;
  const std::int64_t late = threes % multiprocessors;
  const std::int64_t second = late > 0 ? first + kThree : first;
  for (std::int64_t end = std::max(second, (threes * kThree + shorts * kShort) / multiprocessors);; ++end) {
    if ((end - first) / kShort * (multiprocessors - late) + (end - second) / kShort * late >= shorts) return end;
  }
}

// Chooses the partition with the earliest end, and among these the one with the fewest CTAs.
inline DimBlockPartition deal_dim_blocks(const cuda::SsmParams& p, int dim_blocks, int multiprocessors) {
  DimBlockPartition best = count_blocks(p, dim_blocks, 0);
  std::int64_t best_end = end_of_launch(best, p.segments, multiprocessors);
  for (int pairs = 1; pairs <= p.group_heads * dim_blocks / 2; ++pairs) {
    const DimBlockPartition blocks = count_blocks(p, dim_blocks, pairs);
    const std::int64_t end = end_of_launch(blocks, p.segments, multiprocessors);
    if (end >= best_end) continue;
    best = blocks;
    best_end = end;
  }
  return best;
}

}  // namespace ringattn::sm90
