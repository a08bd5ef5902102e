// SPDX-License-Identifier: Apache-2.0
// The epilogue of decode: a work tile stores its partials, and the last one of a row block merges all of them, in
// ascending order, by the same merge step as prefill (kernels/attention/merge.hpp).
#pragma once

#include "kernels/attention/cuda/attention_state.cuh"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/decode/sm90/work_tiles.cuh"

namespace ringattn::sm90 {

inline constexpr int kDecodeBarrier = 1;  // named barrier of the threads that hold acc

// The divisor and LSE of a row, from its softmax_offset and sum over all keys.
__device__ __forceinline__ cuda::RowEnd end_of_row(const cuda::AttentionParams& p, int query_head, float softmax_offset,
                                                   float sum) {
  return cuda::end_row(__fmul_rn(softmax_offset, kLn2), sum, p.sinks == nullptr ? nullptr : p.sinks + query_head);
}
__device__ __forceinline__ void write_lse(const cuda::AttentionParams& p, int row, int query_head, float lse) {
  const auto& to = p.lse;
  if (to.data != nullptr) to.data[row * to.token_stride + query_head * to.head_stride] = lse;
}

// Writes two adjacent columns, divided and rounded.
template <class C>
__device__ __forceinline__ void write_pair(const cuda::AttentionParams& p, int row, int query_head, int column, float x,
                                           float y, float factor) {
  const auto& out = p.out;
  auto* const to =
      static_cast<std::uint16_t*>(out.data) + row * out.token_stride + query_head * out.head_stride + column;
  const std::uint32_t pair =
      cuda::MmaTraits<typename C::Element>::pack(cuda::scale_flushed(x, factor), cuda::scale_flushed(y, factor));
  if (reinterpret_cast<std::uint64_t>(to) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(to) = pair;
  } else {
    to[0] = static_cast<std::uint16_t>(pair);
    to[1] = static_cast<std::uint16_t>(pair >> 16);
  }
}

// Whether a work tile finishes its rows: no other work tile or rank has a split of them.
__device__ __forceinline__ bool finishes(const WorkTileParams& p, const DecodeWorkTile& work_tile) {
  return p.partials.data == nullptr && work_tile.seq_info.single();
}

// Whether a kernel merges the splits of its rows. Otherwise all partials are for the caller or for merge.cu.
template <class Params>
concept MergesSplits = requires(const Params& p) {
  p.scratch;
};
template <class Params>
__device__ __forceinline__ int slices_of(const Params& p) {
  if constexpr (MergesSplits<Params>) {
    return p.slices;
  } else {
    return 1;
  }
}

// Address of the acc of a work tile's row in scratch. Columns are in the order of a saved AttentionState
// (attention/cuda/attention_state.cuh): of each block of 16 columns, thread t of a quad has 2t, 2t + 1, 2t + 8 and 2t +
// 9, adjacent in memory.
template <class C, class Params>
__device__ __forceinline__ float* outputs_of(const Params& p, int work_tile, int tile_row) {
  return p.scratch.outputs + (std::int64_t{work_tile} * p.blocks.rows + tile_row) * C::kDimV;
}
template <class Params>
__device__ __forceinline__ float2* stats_of(const Params& p, int work_tile, int slice, int tile_row) {
  return p.scratch.stats + ((std::int64_t{work_tile} * p.slices + slice) * p.blocks.rows + tile_row);
}
// The same if rows are not finished: a partial for the caller, acc and then stats.
__device__ __forceinline__ float* partial_of(const WorkTileParams& p, int cache_split, const DecodeCoord& coord) {
  return p.partials.data + ((coord.row * p.partials.splits + cache_split) * p.attention.heads + coord.query_head) *
                               (p.attention.head_dim_v + 4);
}
__device__ __forceinline__ float* partial_of(const WorkTileParams& p, const DecodeWorkTile& work_tile,
                                             const DecodeCoord& coord) {
  return partial_of(p, work_tile.cache_split, coord);
}
template <class C, class Params>
__device__ __forceinline__ float* partial_outputs(const Params& p, const DecodeWorkTile& work_tile, int tile_row,
                                                  const DecodeCoord& coord) {
  if constexpr (MergesSplits<Params>) {
    if (p.partials.data == nullptr) return outputs_of<C>(p, work_tile.number, tile_row);
  }
  return partial_of(p, work_tile, coord);
}
// One thread for each row calls it, for the slices [first, end).
template <class Params>
__device__ __forceinline__ void store_stats(const Params& p, const DecodeWorkTile& work_tile, int first, int end,
                                            int tile_row, const DecodeCoord& coord, float2 stats) {
  if (p.partials.data != nullptr) {
    if (first == 0) *reinterpret_cast<float2*>(partial_of(p, work_tile, coord) + p.attention.head_dim_v) = stats;
    return;
  }
  if constexpr (MergesSplits<Params>) {
    for (int slice = first; slice < end; ++slice) __stcg(stats_of(p, work_tile.number, slice, tile_row), stats);
  }
}

// Divides and rounds the columns of a row that one thread has.
template <class C>
struct FinishedRow {
  const cuda::AttentionParams& p;
  const DecodeCoord& coord;
  cuda::RowEnd end;

  __device__ FinishedRow(const cuda::AttentionParams& params, const DecodeCoord& of, float softmax_offset, float sum)
      : p(params), coord(of), end(end_of_row(params, of.query_head, softmax_offset, sum)) {}
  __device__ void write(int column, float x, float y) const {
    write_pair<C>(p, coord.row, coord.query_head, column, x, y, end.factor());
  }
  __device__ void write(int column, float x) const {
    const auto& out = p.out;
    auto* const to = static_cast<std::uint16_t*>(out.data) + coord.row * out.token_stride +
                     coord.query_head * out.head_stride + column;
    *to = static_cast<std::uint16_t>(
        cuda::MmaTraits<typename C::Element>::pack(cuda::scale_flushed(x, end.factor()), 0.0F));
  }
  // Two columns, divided and rounded.
  __device__ std::uint32_t pack(float x, float y) const {
    const float factor = end.factor();
    return cuda::MmaTraits<typename C::Element>::pack(cuda::scale_flushed(x, factor), cuda::scale_flushed(y, factor));
  }
  // Writes eight columns that pack() has rounded.
  __device__ void write(int column, const uint4& eight) const {
    const auto& out = p.out;
    auto* const to = static_cast<std::uint16_t*>(out.data) + coord.row * out.token_stride +
                     coord.query_head * out.head_stride + column;
    if (reinterpret_cast<std::uint64_t>(to) % 16 == 0) {
      *reinterpret_cast<uint4*>(to) = eight;
      return;
    }
    const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
  __device__ void write_lse() const { sm90::write_lse(p, coord.row, coord.query_head, end.lse()); }
};

// Stores a thread's acc of the row of `half`. `to` is where this CTA's columns start.
template <class C>
__device__ __forceinline__ void store_accumulators(float* to, const AttentionState<C>& rows, int half) {
  auto* const outputs = reinterpret_cast<float4*>(to) + thread_of_cta() % 4;
#pragma unroll
  for (int n = 0; n < C::kDimV / 16; ++n) {
    __stcg(outputs + 4 * n, float4{rows.o[2 * n][2 * half], rows.o[2 * n][2 * half + 1], rows.o[2 * n + 1][2 * half],
                                   rows.o[2 * n + 1][2 * half + 1]});
  }
}

// A row's state at the end of its prefix (PrefixStates::states). The prefix launch saves it, and the concurrent launch
// that follows resumes from it.
template <class Params>
__device__ __forceinline__ float* state_of(const Params& p, const DecodeCoord& coord) {
  return p.prefixes.states + (std::int64_t{coord.row} * p.attention.heads + coord.query_head) *
                                 (p.attention.head_dim_v + cuda::kStateStats);
}
template <class Params>
__device__ __forceinline__ float* state_stats(const Params& p, const DecodeCoord& coord) {
  return state_of(p, coord) + p.attention.head_dim_v;
}
// Waits until the states are saved. It can't deadlock: all CTAs of the prefix launch are resident already.
__device__ __forceinline__ void await_states() { cuda::pdl_wait(); }
// Saves the row of `half`, this CTA's columns from `first_column` on. The CTA with column 0 saves the stats.
template <class C, class Params>
__device__ __forceinline__ void save_row(const Params& p, const DecodeCoord& coord, const AttentionState<C>& rows,
                                         int half, int first_column) {
  store_accumulators(state_of(p, coord) + first_column, rows, half);
  if (first_column != 0) return;
  const int lane = thread_of_cta() % 4;
  float* const stats = state_stats(p, coord);
  __stcg(stats + lane, rows.l[half]);
  if (lane == 0) __stcg(stats + cuda::kCurrentOffset, offset_of(rows, half));
}
// Restores all columns of the row of `half`, after await_states().
template <class C, class Params>
__device__ __forceinline__ void restore_row(const Params& p, const DecodeCoord& coord, AttentionState<C>& rows,
                                            int half) {
  const int lane = thread_of_cta() % 4;
  const float* const stats = state_stats(p, coord);
  rows.l[half] = __ldcg(stats + lane);
  const float softmax_offset = __ldcg(stats + cuda::kCurrentOffset);
  if (softmax_offset != -INFINITY) {
    rows.flags |= AttentionState<C>::kOffsetSet << half;
    rows.shift[half] = -softmax_offset;
  }
  const auto* const outputs = reinterpret_cast<const float4*>(state_of(p, coord)) + lane;
#pragma unroll
  for (int n = 0; n < C::kDimV / 16; ++n) {
    const float4 x = __ldcg(outputs + 4 * n);
    rows.o[2 * n][2 * half] = x.x;
    rows.o[2 * n][2 * half + 1] = x.y;
    rows.o[2 * n + 1][2 * half] = x.z;
    rows.o[2 * n + 1][2 * half + 1] = x.w;
  }
}

// Finishes the row of `half` or stores its partial. `sum` is the row's. `first_column` is where this CTA's columns
// start in a partial; the CTA with column 0 stores the stats.
template <class C, class Params>
__device__ __forceinline__ void store_row(const Params& p, const DecodeWorkTile& work_tile,
                                          const ThreadRows& thread_rows, const AttentionState<C>& rows, int half,
                                          float sum, int first_column = 0) {
  const int lane = thread_of_cta() % 4;
  const float softmax_offset = offset_of(rows, half);
  const int tile_row = tile_row_of_thread() + 8 * half;
  if (!finishes(p, work_tile)) {
    store_accumulators(partial_outputs<C>(p, work_tile, tile_row, thread_rows.coord[half]) + first_column, rows, half);
    if (lane == 0 && first_column == 0) {
      store_stats(p, work_tile, 0, slices_of(p), tile_row, thread_rows.coord[half], float2{softmax_offset, sum});
    }
    return;
  }
  const FinishedRow<C> finished(p.attention, thread_rows.coord[half], softmax_offset, sum);
#pragma unroll
  for (int n = 0; n < C::kDimV / 8; ++n) {
    finished.write(8 * n + 2 * lane, rows.o[n][2 * half], rows.o[n][2 * half + 1]);
  }
  if (lane == 0) finished.write_lse();
}

// Four columns of a row, merged over its splits. at(split) returns where a split's acc and stats are.
struct MergedColumns {
  float4 outputs{0.0F, 0.0F, 0.0F, 0.0F};
  float softmax_offset = -INFINITY;
  float sum = 0.0F;
};
struct PartialAt {
  const float4* outputs;
  const float2* stats;
};
template <class At>
__device__ __forceinline__ MergedColumns merge_splits(int begin, int end, At at) {
  MergedColumns merged;
  constexpr int kBatch = 8;  // loads in flight
#pragma unroll 1
  for (int first = begin; first < end; first += kBatch) {
    float4 outputs[kBatch];
    float2 stats[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= end) break;
      const PartialAt from = at(first + i);
      outputs[i] = __ldcg(from.outputs);
      stats[i] = __ldcg(from.stats);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= end) break;
      const float4& x = outputs[i];
      if (first + i == begin) {
        merged = {x, stats[i].x, stats[i].y};
        continue;
      }
      const MergeStep step =
          cuda::merge_partials(merged.softmax_offset, merged.sum, stats[i].x, stats[i].y, kOffsetLog2Factor);
      merged.softmax_offset = step.softmax_offset;
      merged.sum = step.sum;
      using Arithmetic = cuda::TensorArithmetic;
      merged.outputs = {Arithmetic::join(merged.outputs.x, x.x, step), Arithmetic::join(merged.outputs.y, x.y, step),
                        Arithmetic::join(merged.outputs.z, x.z, step), Arithmetic::join(merged.outputs.w, x.w, step)};
    }
  }
  return merged;
}

// Finishes the four columns number `share` of a row.
template <class C>
__device__ __forceinline__ void write_merged(const cuda::AttentionParams& p, const DecodeCoord& coord, int share,
                                             const MergedColumns& merged) {
  const FinishedRow<C> finished(p, coord, merged.softmax_offset, merged.sum);
  const int column = share / 4 * 16 + share % 4 * 2;
  finished.write(column, merged.outputs.x, merged.outputs.y);
  finished.write(column + 8, merged.outputs.z, merged.outputs.w);
  if (share == 0) finished.write_lse();
}

// All threads with acc call it, `thread` of kThreads, after storing their slice of a work tile's partials. If it is the
// last work tile of the row block, its slice is merged.
template <class C, int kThreads, class Params>
__device__ __forceinline__ void merge_if_last(const Params& p, const DecodeWorkTile& work_tile, int thread, int slice) {
  __threadfence();
  named_sync(kDecodeBarrier, kThreads);
  bool last = false;
  if (thread == 0) {
    const std::int64_t rows =
        (std::int64_t{work_tile.sequence} * p.attention.kv_heads + work_tile.kv_head) * p.blocks.count +
        work_tile.block;
    std::int32_t* const arrived = p.scratch.arrived + rows * p.slices + slice;
    last = atomicAdd(arrived, 1) == work_tile.seq_info.splits - 1;
    if (last) *arrived = 0;  // resets the counter for the next step
  }
  if (!named_any(kDecodeBarrier, kThreads, last)) return;
  __threadfence();
  const int shares = C::kDimV / 4 / p.slices;
#pragma unroll 1
  for (int i = thread; i < rows_of(p, work_tile) * shares; i += kThreads) {
    const int tile_row = i / shares;
    const int share = slice * shares + i % shares;
    const DecodeCoord coord = coord_of(p, work_tile, tile_row);
    const RowKvSplits splits = splits_of<C>(p, work_tile, coord);
    write_merged<C>(p.attention, coord, share, merge_splits(splits.begin, splits.end, [&](int split) {
                      const int at =
                          work_tile.first_number + (split - work_tile.seq_info.begin_split) * work_tile.stride;
                      return PartialAt{reinterpret_cast<const float4*>(outputs_of<C>(p, at, tile_row)) + share,
                                       stats_of(p, at, slice, tile_row)};
                    }));
  }
}

}  // namespace ringattn::sm90
