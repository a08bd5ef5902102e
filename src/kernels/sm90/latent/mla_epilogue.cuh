// SPDX-License-Identifier: Apache-2.0
// What becomes of a CTA's rows behind a work_tile. They are left as partials, which a launch behind merges, or finished
// where there is nothing else of them. A CTA that has all groups of its rows (mla_schedule.cuh) keeps in a record what
// those so far come to: each thread reads what it wrote itself, so nobody waits for anybody. The merge step is that of
// all kernels (kernels/merge.hpp).
#pragma once

#include "kernels/sm90/decode/finish.cuh"
#include "kernels/sm90/latent/mla_map.cuh"

namespace ringattn::sm90 {

// Whether what the work_tile's rows have of earlier splits is not this CTA's.
__device__ __forceinline__ bool begins_rows(const MlaMap& map, const DecodeWorkTile& work_tile) {
  return load_number(map.whole()) == 0 || work_tile.cache_split == work_tile.of.begin_split;
}

// What becomes of a row behind a work_tile: it joins what the CTA has of the splits before, is left there, or ends.
struct RowTransition {
  bool attends;  // the split is one of the row's
  bool joins, ends;
};
template <class C>
__device__ __forceinline__ RowTransition transition_of(const DecodeParams& p, const MlaMap& map,
                                                       const DecodeWorkTile& work_tile, const DecodeCoord& coord) {
  if (load_number(map.whole()) == 0) return {true, false, finishes(p, work_tile)};
  const RowKvSplits splits = splits_of<C>(p, work_tile, coord);
  const int split = work_tile.cache_split;
  const bool attends = splits.begin <= split && split < splits.end;
  return {attends, attends && split > splits.begin, split + 1 == splits.end};
}

// A thread's share of the rows, behind a work_tile: their columns from `first_column` on. `folded`: the work_tile has
// tiles.
template <class C>
__device__ __forceinline__ void store_rows(const DecodeParams& p, const MlaMap& map, const DecodeWorkTile& work_tile,
                                           const ThreadRows& slots, int first_column, bool folded,
                                           float (&o)[C::kColumns / 8][4]) {
  const int lane = thread_of_cta() % 4;
  const int block = first_column / 16;
  const bool first_columns = first_column == 0;
  const bool whole = load_number(map.whole()) != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = tile_row_of_thread() + 8 * half;
    const bool present = slots.present[half];
    const DecodeCoord& coord = slots.coord[half];
    const RowTransition turn = transition_of<C>(p, map, work_tile, coord);
    const bool sees = folded && turn.attends;
    float softmax_offset = sees ? load_float(map.softmax_offset(slot)) : -INFINITY;
    float sum = sum_of_quad(sees ? load_float(map.sum(slot, lane)) : 0.0F);
    // Of the row, where the CTA has all of its splits: those of this warpgroup's columns, and stats of its own.
    float* const record = p.partials == nullptr ? nullptr : partial_of(p, whole ? 0 : work_tile.cache_split, coord);
    auto* const outputs = reinterpret_cast<float4*>(record) + 4 * block + lane;
    auto* const stats = reinterpret_cast<float2*>(record + C::kDimV) + (whole && !first_columns ? 1 : 0);
    if (turn.joins) {
      const float2 before = __ldcg(stats);
      const MergeStep step = cuda::merge_partials(before.x, before.y, softmax_offset, sum, kOffsetLog2Factor);
      softmax_offset = step.softmax_offset;
      sum = step.sum;
      constexpr int kAtOnce = 8;
#pragma unroll
      for (int first = 0; first < C::kColumns / 16; first += kAtOnce) {
        float4 of_before[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) of_before[n] = __ldcg(outputs + 4 * (first + n));
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const float closed[4] = {of_before[n].x, of_before[n].y, of_before[n].z, of_before[n].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& open = o[2 * (first + n) + i / 2][2 * half + i % 2];
            open = cuda::TensorArithmetic::join(closed[i], open, step);
          }
        }
      }
    }
    if (!turn.ends && sees && present) {  // else another work_tile has the row, or the merge finds that none has
#pragma unroll
      for (int n = 0; n < C::kColumns / 16; ++n) {
        __stcg(outputs + 4 * n,
               float4{o[2 * n][2 * half], o[2 * n][2 * half + 1], o[2 * n + 1][2 * half], o[2 * n + 1][2 * half + 1]});
      }
      if (whole || (first_columns && lane == 0)) __stcg(stats, float2{softmax_offset, sum});
    }
    if (__any_sync(0xffffffffU, turn.ends) == 0) continue;
    const FinishedRow<C> finished(p, coord, softmax_offset, sum);
    const bool writes = turn.ends && present;
#pragma unroll
    for (int n = 0; n < C::kColumns / 8; n += 4) {
      const auto two = [&](int i) { return finished.pack(o[n + i][2 * half], o[n + i][2 * half + 1]); };
      const uint4 eight = turn_in_quad(uint4{two(0), two(1), two(2), two(3)}, lane);
      if (writes) finished.write(first_column + 8 * (n + lane), eight);
    }
    if (writes && first_columns && lane == 0) finished.write_lse();
  }
}

}  // namespace ringattn::sm90
