// SPDX-License-Identifier: Apache-2.0
// How the bands of a range of heads are dealt to CTAs, and in which order: three at a time, and two at a time where
// they don't come out even, or where that ends a launch earlier. A multiprocessor has one CTA, and those of two bands
// are shorter, so they come last. Which bands share a CTA doesn't touch bits.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/scan/head_blocks.cuh"

namespace ringattn::sm90 {

// 64 dims of a head are what a warpgroup computes: a band of the head. Three of them share B and C.
inline constexpr int kBandDims = 64;
inline constexpr int kBandsTogether = 3;

// Of one segment.
struct BandBlocks {
  std::int32_t bands = 1;       // of a head
  std::int32_t most_pairs = 0;  // of a group, beyond those that it takes to come out even
  std::int32_t threes = 0;      // CTAs of three bands, of all groups
  std::int32_t shorts = 0;      // CTAs of two, or of a group's only band
};

// How `bands` of one group are cut: threes first, then shorts of two bands.
struct BandCut {
  int threes;
  int shorts;
};
__host__ __device__ constexpr BandCut cut_bands(int bands, int most_pairs) {
  if (bands == 1) return {0, 1};
  const int pairs = 2 * bands % 3;  // at least, and three more each time
  const int possible = most_pairs < bands / 2 ? most_pairs : bands / 2;
  const int more = possible > pairs ? (possible - pairs) / 3 * 3 : 0;
  return {(bands - 2 * (pairs + more)) / 3, pairs + more};
}

// Calls visit(first band, bands, group) for what the range has of each group, until it returns true.
template <class Visit>
__host__ __device__ inline void visit_group_bands(const cuda::ScanParams& p, int bands, Visit visit) {
  const int end = p.first_head + p.head_count;
  for (int head = p.first_head; head < end;) {
    const int group = head / p.group_heads;
    const int behind = (group + 1) * p.group_heads < end ? (group + 1) * p.group_heads : end;
    if (visit(head * bands, (behind - head) * bands, group)) return;
    head = behind;
  }
}

// A CTA's segment, of the launch's, and its bands.
struct BandUnit {
  std::int64_t segment;
  cuda::HeadBlock block;
};
__host__ __device__ inline BandUnit band_unit(const cuda::ScanParams& p, const BandBlocks& blocks, int cta) {
  const int threes = blocks.threes * p.segments;
  const bool is_short = cta >= threes;
  const int among = is_short ? cta - threes : cta;
  const int in_segment = is_short ? blocks.shorts : blocks.threes;
  int nth = among % in_segment;
  BandUnit unit{among / in_segment, {}};
  visit_group_bands(p, blocks.bands, [&](int first, int bands, int group) {
    const BandCut cut = cut_bands(bands, blocks.most_pairs);
    const int here = is_short ? cut.shorts : cut.threes;
    if (nth >= here) {
      nth -= here;
      return false;
    }
    const int before = is_short ? kBandsTogether * cut.threes + 2 * nth : kBandsTogether * nth;
    const int left = bands - before;
    const int most = is_short ? 2 : kBandsTogether;
    unit.block = {first + before, left < most ? left : most, group};
    return true;
  });
  return unit;
}

inline BandBlocks count_blocks(const cuda::ScanParams& p, int bands, int most_pairs) {
  BandBlocks blocks{bands, most_pairs, 0, 0};
  visit_group_bands(p, bands, [&](int, int of_group, int) {
    const BandCut cut = cut_bands(of_group, most_pairs);
    blocks.threes += cut.threes;
    blocks.shorts += cut.shorts;
    return false;
  });
  return blocks;
}

// When the last CTA of a launch ends, if one takes as long as its bands and one more: what all of them need once.
inline std::int64_t end_of_launch(const BandBlocks& blocks, std::int64_t segments, std::int64_t multiprocessors) {
  constexpr std::int64_t kThree = 4;
  constexpr std::int64_t kShort = 3;
  const std::int64_t threes = blocks.threes * segments;
  const std::int64_t shorts = blocks.shorts * segments;
  const std::int64_t first = threes / multiprocessors * kThree;  // some are done with the threes then, `late` aren't
  const std::int64_t late = threes % multiprocessors;
  const std::int64_t second = late > 0 ? first + kThree : first;
  for (std::int64_t end = std::max(second, (threes * kThree + shorts * kShort) / multiprocessors);; ++end) {
    if ((end - first) / kShort * (multiprocessors - late) + (end - second) / kShort * late >= shorts) return end;
  }
}

// Those with which a launch ends first, and of these the ones with the fewest CTAs.
inline BandBlocks deal_bands(const cuda::ScanParams& p, int bands, int multiprocessors) {
  BandBlocks best = count_blocks(p, bands, 0);
  std::int64_t best_end = end_of_launch(best, p.segments, multiprocessors);
  for (int pairs = 1; pairs <= p.group_heads * bands / 2; ++pairs) {
    const BandBlocks blocks = count_blocks(p, bands, pairs);
    const std::int64_t end = end_of_launch(blocks, p.segments, multiprocessors);
    if (end >= best_end) continue;
    best = blocks;
    best_end = end;
  }
  return best;
}

}  // namespace ringattn::sm90
