// SPDX-License-Identifier: Apache-2.0
// Epilogue of mla_kernel: stores the rows of a work tile as partials for the merge launch, or as outputs if the row has
// no other KV split. A CTA with all KV splits of its rows (mla_schedule.cuh) keeps the merged splits as a partial in
// global memory. Each thread reads back only what it wrote, so no synchronization is needed. The merge step is that of
// all kernels (kernels/attention/merge.hpp).
#pragma once

#include "kernels/decode/sm90/finish.cuh"
#include "kernels/mla/sm90/mla_map.cuh"

namespace ringattn::sm90 {

// True if this CTA does not hold merged earlier splits of the work tile's rows.
__device__ __forceinline__ bool begins_rows(const MlaMap& map, const DecodeWorkTile& work_tile) {
  return load_number(map.all_splits()) == 0 || work_tile.cache_split == work_tile.seq_info.begin_split;
}

// How the epilogue treats a row: it merges the CTA's earlier splits, stores a partial, or finishes the row.
struct RowTransition {
  bool attends;  // the row attends to keys of this split
  bool joins, ends;
};
template <class C>
__device__ __forceinline__ RowTransition transition_of(const DecodeParams& p, const MlaMap& map,
                                                       const DecodeWorkTile& work_tile, const DecodeCoord& coord) {
  if (load_number(map.all_splits()) == 0) return {true, false, finishes(p, work_tile)};
  const RowKvSplits splits = splits_of<C>(p, work_tile, coord);
  const int split = work_tile.cache_split;
  const bool attends = splits.begin <= split && split < splits.end;
  return {attends, attends && split > splits.begin, split + 1 == splits.end};
}

// Stores a thread's elements of the rows after a work tile: its columns from `first_column` on. `has_tiles`: the work
// tile is not empty.
template <class C>
__device__ __forceinline__ void store_rows(const DecodeParams& p, const MlaMap& map, const DecodeWorkTile& work_tile,
                                           const ThreadRows& thread_rows, int first_column, bool has_tiles,
                                           float (&o)[C::kColumns / 8][4]) {
  const int lane = thread_of_cta() % 4;
  const int block = first_column / 16;
  const bool first_columns = first_column == 0;
  const bool all_splits = load_number(map.all_splits()) != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = tile_row_of_thread() + 8 * half;
    const bool present = thread_rows.present[half];
    const DecodeCoord& coord = thread_rows.coord[half];
    const RowTransition transition = transition_of<C>(p, map, work_tile, coord);
    const bool attends = has_tiles && transition.attends;
    float softmax_offset = attends ? load_float(map.softmax_offset(tile_row)) : -INFINITY;
    float sum = sum_of_quad(attends ? load_float(map.sum(tile_row, lane)) : 0.0F);
    // With all splits in this CTA, the row's merged partial: each warpgroup has its own columns and its own (offset,
    // sum).
    float* const partial =
        p.partials == nullptr ? nullptr : partial_of(p, all_splits ? 0 : work_tile.cache_split, coord);
    auto* const outputs = reinterpret_cast<float4*>(partial) + 4 * block + lane;
    auto* const stats = reinterpret_cast<float2*>(partial + C::kDimV) + (all_splits && !first_columns ? 1 : 0);
    if (transition.joins) {
      const float2 before = __ldcg(stats);
      const MergeStep step = cuda::merge_partials(before.x, before.y, softmax_offset, sum, kOffsetLog2Factor);
      softmax_offset = step.softmax_offset;
      sum = step.sum;
      constexpr int kAtOnce = 8;
#pragma unroll
      for (int first = 0; first < C::kColumns / 16; first += kAtOnce) {
        float4 merged[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) merged[n] = __ldcg(outputs + 4 * (first + n));
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const float earlier[4] = {merged[n].x, merged[n].y, merged[n].z, merged[n].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& current = o[2 * (first + n) + i / 2][2 * half + i % 2];
            current = cuda::TensorArithmetic::join(earlier[i], current, step);
          }
        }
      }
    }
    // A row without a partial here is finished by another work tile, or by the merge launch.
    if (!transition.ends && attends && present) {
#pragma unroll
      for (int n = 0; n < C::kColumns / 16; ++n) {
        __stcg(outputs + 4 * n,
               float4{o[2 * n][2 * half], o[2 * n][2 * half + 1], o[2 * n + 1][2 * half], o[2 * n + 1][2 * half + 1]});
      }
      if (all_splits || (first_columns && lane == 0)) __stcg(stats, float2{softmax_offset, sum});
    }
    if (__any_sync(0xffffffffU, transition.ends) == 0) continue;
    const FinishedRow<C> finished(p, coord, softmax_offset, sum);
    const bool writes = transition.ends && present;
#pragma unroll
    for (int n = 0; n < C::kColumns / 8; n += 4) {
      const auto two = [&](int i) { return finished.pack(o[n + i][2 * half], o[n + i][2 * half + 1]); };
      const uint4 eight = transpose_in_quad(uint4{two(0), two(1), two(2), two(3)}, lane);
      if (writes) finished.write(first_column + 8 * (n + lane), eight);
    }
    if (writes && first_columns && lane == 0) finished.write_lse();
  }
}

}  // namespace ringattn::sm90
