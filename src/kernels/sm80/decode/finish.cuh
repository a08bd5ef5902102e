// SPDX-License-Identifier: Apache-2.0
// The end of rows: a work_tile leaves its partials, and whoever leaves the last ones of a part's rows merges them, in
// ascending order, by the fold's own step (kernels/merge.hpp).
#pragma once

#include "kernels/cuda/device/merge_arithmetic.cuh"
#include "kernels/cuda/device/row_end.cuh"
#include "kernels/sm80/decode/work_tiles.cuh"
#include "kernels/sm80/row_state.cuh"

namespace ringattn::sm80 {

// Two neighbouring columns, divided and rounded.
template <class Element>
__device__ __forceinline__ void write_pair(const cuda::AttentionParams& p, std::int64_t row, int head, int column,
                                           float x, float y, float factor) {
  auto* const to =
      static_cast<std::uint16_t*>(p.out.data) + row * p.out.token_stride + head * p.out.head_stride + column;
  const std::uint32_t pair = cuda::Products<Element>::pack(__fmul_rn(x, factor), __fmul_rn(y, factor));
  if (reinterpret_cast<std::uint64_t>(to) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(to) = pair;
  } else {
    to[0] = static_cast<std::uint16_t>(pair);
    to[1] = static_cast<std::uint16_t>(pair >> 16);
  }
}

// Columns 16n + 2t, 16n + 2t + 1 and the two that lie 8 behind them: share 4n + t of a row.
template <class Element>
__device__ __forceinline__ void write_share(const cuda::AttentionParams& p, std::int64_t row, int head, int share,
                                            const float4& x, float factor) {
  const int column = share / 4 * 16 + share % 4 * 2;
  write_pair<Element>(p, row, head, column, x.x, x.y, factor);
  write_pair<Element>(p, row, head, column + 8, x.z, x.w, factor);
}

__device__ __forceinline__ cuda::RowEnd end_of_row(const cuda::AttentionParams& p, int head, float softmax_offset,
                                                   float sum) {
  return cuda::end_row(__fmul_rn(softmax_offset, p.softmax.exponent), sum,
                       p.sinks == nullptr ? nullptr : p.sinks + head);
}
__device__ __forceinline__ void write_lse(const cuda::AttentionParams& p, std::int64_t row, int head, float lse) {
  if (p.lse.data != nullptr) p.lse.data[row * p.lse.token_stride + head * p.lse.head_stride] = lse;
}

// Where a record begins; a share of its row's columns is one float4.
template <class Float>
__device__ __forceinline__ Float* partial_at(Float* partials, std::int64_t splits, const cuda::AttentionParams& p,
                                             std::int64_t row, std::int64_t split, int head) {
  return partials + ((row * splits + split) * p.heads + head) * partial_floats(p.head_dim_v);
}

// A share of a row, merged over `splits` splits, divided, rounded and written. record(i) is where the i-th one's
// begins.
template <class Element, class Record>
__device__ __forceinline__ void finish_share(const cuda::AttentionParams& p, std::int64_t row, int head, int share,
                                             int splits, Record record) {
  float4 merged{0.0F, 0.0F, 0.0F, 0.0F};
  float softmax_offset = -INFINITY;
  float sum = 0.0F;
  constexpr int kBatch = 8;  // on their way from memory at a time
  for (int batch = 0; batch < splits; batch += kBatch) {
    float4 outputs[kBatch];
    float2 stats[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (batch + i >= splits) break;
      const float* const at = record(batch + i);
      outputs[i] = __ldcg(reinterpret_cast<const float4*>(at) + share);
      stats[i] = __ldcg(reinterpret_cast<const float2*>(at + p.head_dim_v));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (batch + i >= splits) break;
      if (batch + i == 0) {
        merged = outputs[i];
        softmax_offset = stats[i].x;
        sum = stats[i].y;
        continue;
      }
      const MergeStep step =
          cuda::merge_partials(softmax_offset, sum, stats[i].x, stats[i].y, p.softmax.exponent_base2);
      softmax_offset = step.softmax_offset;
      sum = step.sum;
      merged = join(merged, outputs[i], step);
    }
  }
  const cuda::RowEnd end = end_of_row(p, head, softmax_offset, sum);
  write_share<Element>(p, row, head, share, merged, end.factor());
  if (share == 0) write_lse(p, row, head, end.lse());
}

template <class C>
__device__ __forceinline__ void store_partials(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                               const AttentionState<C>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
  for_each_row<C>([&](int block, int half, int tile_row) {
    const float sum = over_quad(state.l[block][half]);
    if (tile_row >= work_tile.tile_rows) return;
    const DecodeRow row = row_of(p, work_tile, tile_row);
    auto* const record = reinterpret_cast<float4*>(
        partial_at(p.partials, p.partial_splits, p.attention, row.row, work_tile.partial_index, row.head));
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
      __stcg(record + first_column<C>() / 4 + 4 * n + lane, share(state, block, half, n));
    }
    if (writes_stats<C>()) __stcg(record + C::kDimV / 4, float4{state.m[block][half], sum, 0.0F, 0.0F});
  });
}

// Called by the whole CTA once a work_tile's partials are left: where they are the last ones of its rows, all are
// merged.
template <class C>
__device__ __forceinline__ void merge_if_last(const DecodeParams& p, const DecodeWorkTile& work_tile) {
  if (work_tile.splits > 1) {
    __threadfence();
    __syncthreads();
    int last = 0;
    if (threadIdx.x == 0) {
      last = atomicAdd(p.arrived + work_tile.arrived, 1) == work_tile.splits - 1 ? 1 : 0;
      if (last != 0) p.arrived[work_tile.arrived] = 0;  // for the next step
    }
    if (__syncthreads_or(last) == 0) return;
    __threadfence();
  } else {
    __syncthreads();
  }
  constexpr int kShares = C::kDimV / 4;
  for (int i = static_cast<int>(threadIdx.x); i < work_tile.tile_rows * kShares; i += C::kThreads) {
    const DecodeRow row = row_of(p, work_tile, i / kShares);
    finish_share<typename C::Element>(p.attention, row.row, row.head, i % kShares, work_tile.splits, [&](int split) {
      return partial_at(static_cast<const float*>(p.partials), p.partial_splits, p.attention, row.row,
                        std::int64_t{work_tile.first_partial} + split, row.head);
    });
  }
}

}  // namespace ringattn::sm80
