// SPDX-License-Identifier: Apache-2.0
// Decode epilogue. A work tile writes its partials. The CTA that writes the last ones of a row group merges them in
// ascending order with the prefill's merge step (kernels/attention/merge.hpp).
#pragma once

#include "kernels/attention/cuda/merge_arithmetic.cuh"
#include "kernels/attention/cuda/row_end.cuh"
#include "kernels/attention/sm80/row_state.cuh"
#include "kernels/decode/sm80/work_tiles.cuh"

namespace ringattn::sm80 {

// Writes two neighbouring columns, normalized and rounded.
template <class Element>
__device__ __forceinline__ void write_pair(const cuda::AttentionParams& p, std::int64_t row, int head, int column,
                                           float x, float y, float factor) {
  auto* const to =
      static_cast<std::uint16_t*>(p.out.data) + row * p.out.token_stride + head * p.out.head_stride + column;
  const std::uint32_t pair = cuda::MmaTraits<Element>::pack(__fmul_rn(x, factor), __fmul_rn(y, factor));
  if (reinterpret_cast<std::uint64_t>(to) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(to) = pair;
  } else {
    to[0] = static_cast<std::uint16_t>(pair);
    to[1] = static_cast<std::uint16_t>(pair >> 16);
  }
}

// Writes column quad 4n + t of a row: columns 16n + 2t, 16n + 2t + 1 and the two columns 8 after them.
template <class Element>
__device__ __forceinline__ void write_columns(const cuda::AttentionParams& p, std::int64_t row, int head,
                                              int column_quad, const float4& x, float factor) {
  const int column = column_quad / 4 * 16 + column_quad % 4 * 2;
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

// Address of a partial. A column quad of its row is one float4.
template <class Float>
__device__ __forceinline__ Float* partial_at(Float* partials, std::int64_t splits, const cuda::AttentionParams& p,
                                             std::int64_t row, std::int64_t split, int head) {
  return partials + ((row * splits + split) * p.heads + head) * partial_floats(p.head_dim_v);
}

// Merges a column quad of a row over `splits` splits, then normalizes, rounds and writes it. partial(i) returns the
// address of the i-th partial.
template <class Element, class PartialAt>
__device__ __forceinline__ void finish_columns(const cuda::AttentionParams& p, std::int64_t row, int head,
                                               int column_quad, int splits, PartialAt partial) {
  float4 merged{0.0F, 0.0F, 0.0F, 0.0F};
  float softmax_offset = -INFINITY;
  float sum = 0.0F;
  constexpr int kBatch = 8;  // partials loaded at a time
  for (int batch = 0; batch < splits; batch += kBatch) {
    float4 outputs[kBatch];
    float2 stats[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (batch + i >= splits) break;
      const float* const at = partial(batch + i);
      outputs[i] = __ldcg(reinterpret_cast<const float4*>(at) + column_quad);
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
  write_columns<Element>(p, row, head, column_quad, merged, end.factor());
  if (column_quad == 0) write_lse(p, row, head, end.lse());
}

template <class C>
__device__ __forceinline__ void store_partials(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                               const AttentionState<C>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
  for_each_row<C>([&](int block, int half, int tile_row) {
    const float sum = quad_sum(state.l[block][half]);
    if (tile_row >= work_tile.tile_rows) return;
    const DecodeRow row = row_of(p, work_tile, tile_row);
    auto* const partial = reinterpret_cast<float4*>(
        partial_at(p.partials, p.partial_splits, p.attention, row.row, work_tile.partial_index, row.head));
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
      __stcg(partial + first_column<C>() / 4 + 4 * n + lane, thread_columns(state, block, half, n));
    }
    if (writes_stats<C>()) __stcg(partial + C::kDimV / 4, float4{state.m[block][half], sum, 0.0F, 0.0F});
  });
}

// Called by the whole CTA after it has written a work tile's partials. If they are the last ones of the tile's rows,
// merges all of them.
template <class C>
__device__ __forceinline__ void merge_if_last(const DecodeParams& p, const DecodeWorkTile& work_tile) {
  if (work_tile.splits > 1) {
    __threadfence();
    __syncthreads();
    int last = 0;
    if (threadIdx.x == 0) {
      last = atomicAdd(p.arrived + work_tile.arrived, 1) == work_tile.splits - 1 ? 1 : 0;
      if (last != 0) p.arrived[work_tile.arrived] = 0;  // for the next decode step
    }
    if (__syncthreads_or(last) == 0) return;
    __threadfence();
  } else {
    __syncthreads();
  }
  constexpr int kColumnQuads = C::kDimV / 4;
  for (int i = static_cast<int>(threadIdx.x); i < work_tile.tile_rows * kColumnQuads; i += C::kThreads) {
    const DecodeRow row = row_of(p, work_tile, i / kColumnQuads);
    finish_columns<typename C::Element>(
        p.attention, row.row, row.head, i % kColumnQuads, work_tile.splits, [&](int split) {
          return partial_at(static_cast<const float*>(p.partials), p.partial_splits, p.attention, row.row,
                            std::int64_t{work_tile.first_partial} + split, row.head);
        });
  }
}

}  // namespace ringattn::sm80
