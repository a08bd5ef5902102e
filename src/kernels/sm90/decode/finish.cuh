// SPDX-License-Identifier: Apache-2.0
// The end of rows: a unit leaves its partials, and whoever leaves the last ones of a sequence's rows merges them, in
// ascending order, by the fold's own step (kernels/merge.hpp).
#pragma once

#include "kernels/cuda/device/fold_state.cuh"
#include "kernels/cuda/device/merge_arithmetic.cuh"
#include "kernels/cuda/device/overlap.cuh"
#include "kernels/cuda/device/row_end.cuh"
#include "kernels/sm90/decode/slots.cuh"
#include "kernels/sm90/ptx/threads.cuh"

namespace ringattn::sm90 {

inline constexpr int kDecodeBarrier = 1;  // of the threads that hold outputs

// A row's division and LSE, from its reference and its sum over all keys.
__device__ __forceinline__ cuda::RowEnd end_of_row(const DecodeParams& p, int query_head, float reference, float sum) {
  return cuda::end_row(__fmul_rn(reference, kLn2), sum, p.fold.sinks == nullptr ? nullptr : p.fold.sinks + query_head);
}
__device__ __forceinline__ void write_lse(const DecodeParams& p, int row, int query_head, float lse) {
  const auto& to = p.fold.lse;
  if (to.data != nullptr) to.data[row * to.token_stride + query_head * to.head_stride] = lse;
}

// Two neighbouring columns, divided and rounded.
template <class C>
__device__ __forceinline__ void write_pair(const DecodeParams& p, int row, int query_head, int column, float x, float y,
                                           float factor) {
  const auto& out = p.fold.out;
  auto* const to =
      static_cast<std::uint16_t*>(out.data) + row * out.token_stride + query_head * out.head_stride + column;
  const std::uint32_t pair =
      cuda::Products<typename C::Element>::pack(cuda::scale_flushed(x, factor), cuda::scale_flushed(y, factor));
  if (reinterpret_cast<std::uint64_t>(to) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(to) = pair;
  } else {
    to[0] = static_cast<std::uint16_t>(pair);
    to[1] = static_cast<std::uint16_t>(pair >> 16);
  }
}

// Whether a unit's rows end with it: nobody else has anything of them.
__device__ __forceinline__ bool finishes(const DecodeParams& p, const DecodeUnit& unit) {
  return p.records == nullptr && unit.of.single();
}

// A row's partial of a unit's group. Columns lie as in a fold state (cuda/device/fold_state.cuh): of the 16 columns of
// a block, thread t of four has 2t, 2t + 1, 2t + 8 and 2t + 9 side by side.
template <class C>
__device__ __forceinline__ float* outputs_of(const DecodeParams& p, int unit, int slot) {
  return p.outputs + (std::int64_t{unit} * p.block_rows + slot) * C::kDimV;
}
__device__ __forceinline__ float2* numbers_of(const DecodeParams& p, int unit, int slice, int slot) {
  return p.numbers + ((std::int64_t{unit} * p.slices + slice) * p.block_rows + slot);
}
// The same where rows are not finished: a record, A and then the numbers.
__device__ __forceinline__ float* record_of(const DecodeParams& p, int cache_group, const DecodePlace& place) {
  return p.records +
         ((place.row * p.record_groups + cache_group) * p.fold.heads + place.query_head) * (p.fold.head_dim_v + 4);
}
__device__ __forceinline__ float* record_of(const DecodeParams& p, const DecodeUnit& unit, const DecodePlace& place) {
  return record_of(p, unit.cache_group, place);
}
template <class C>
__device__ __forceinline__ float* left_outputs(const DecodeParams& p, const DecodeUnit& unit, int slot,
                                               const DecodePlace& place) {
  return p.records == nullptr ? outputs_of<C>(p, unit.number, slot) : record_of(p, unit, place);
}
// By one thread of those that leave a row, for the slices [first, end).
__device__ __forceinline__ void leave_numbers(const DecodeParams& p, const DecodeUnit& unit, int first, int end,
                                              int slot, const DecodePlace& place, float2 numbers) {
  if (p.records != nullptr) {
    if (first == 0) *reinterpret_cast<float2*>(record_of(p, unit, place) + p.fold.head_dim_v) = numbers;
    return;
  }
  for (int slice = first; slice < end; ++slice) __stcg(numbers_of(p, unit.number, slice, slot), numbers);
}

// A row's division and rounding, of columns that one thread has.
template <class C>
struct FinishedRow {
  const DecodeParams& p;
  const DecodePlace& place;
  cuda::RowEnd end;

  __device__ FinishedRow(const DecodeParams& params, const DecodePlace& of, float reference, float sum)
      : p(params), place(of), end(end_of_row(params, of.query_head, reference, sum)) {}
  __device__ void write(int column, float x, float y) const {
    write_pair<C>(p, place.row, place.query_head, column, x, y, end.factor());
  }
  __device__ void write(int column, float x) const {
    const auto& out = p.fold.out;
    auto* const to = static_cast<std::uint16_t*>(out.data) + place.row * out.token_stride +
                     place.query_head * out.head_stride + column;
    *to = static_cast<std::uint16_t>(
        cuda::Products<typename C::Element>::pack(cuda::scale_flushed(x, end.factor()), 0.0F));
  }
  // Two columns, divided and rounded.
  __device__ std::uint32_t pack(float x, float y) const {
    const float factor = end.factor();
    return cuda::Products<typename C::Element>::pack(cuda::scale_flushed(x, factor), cuda::scale_flushed(y, factor));
  }
  // Eight columns that have been.
  __device__ void write(int column, const uint4& eight) const {
    const auto& out = p.fold.out;
    auto* const to = static_cast<std::uint16_t*>(out.data) + place.row * out.token_stride +
                     place.query_head * out.head_stride + column;
    if (reinterpret_cast<std::uint64_t>(to) % 16 == 0) {
      *reinterpret_cast<uint4*>(to) = eight;
      return;
    }
    const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
  __device__ void write_lse() const { sm90::write_lse(p, place.row, place.query_head, end.lse()); }
};

// A thread's columns of a row of `half`, to where those that its CTA has begin.
template <class C>
__device__ __forceinline__ void leave_columns(float* to, const Rows<C>& rows, int half) {
  auto* const outputs = reinterpret_cast<float4*>(to) + thread_of_cta() % 4;
#pragma unroll
  for (int n = 0; n < C::kDimV / 16; ++n) {
    __stcg(outputs + 4 * n, float4{rows.o[2 * n][2 * half], rows.o[2 * n][2 * half + 1], rows.o[2 * n + 1][2 * half],
                                   rows.o[2 * n + 1][2 * half + 1]});
  }
}

// A row's state where its prefix's tiles end (DecodeParams::states). The launch of the prefixes saves it; the one
// behind it, which runs beside it, goes on from there.
__device__ __forceinline__ float* state_of(const DecodeParams& p, const DecodePlace& place) {
  return p.states +
         (std::int64_t{place.row} * p.fold.heads + place.query_head) * (p.fold.head_dim_v + cuda::kStateNumbers);
}
__device__ __forceinline__ float* state_numbers(const DecodeParams& p, const DecodePlace& place) {
  return state_of(p, place) + p.fold.head_dim_v;
}
// Until states are there. Nobody waits here for ever: the launch of the prefixes has all of its CTAs already.
__device__ __forceinline__ void await_states() { cuda::await_kernels_before(); }
// Saves the row of `half`, the columns from `first_column` on; who has the first ones saves the numbers.
template <class C>
__device__ __forceinline__ void save_row(const DecodeParams& p, const DecodePlace& place, const Rows<C>& rows, int half,
                                         int first_column) {
  leave_columns(state_of(p, place) + first_column, rows, half);
  if (first_column != 0) return;
  const int lane = thread_of_cta() % 4;
  float* const numbers = state_numbers(p, place);
  __stcg(numbers + lane, rows.l[half]);
  if (lane == 0) __stcg(numbers + cuda::kOpenReference, reference_of(rows, half));
}
// The other way round, of all columns, by who has awaited states.
template <class C>
__device__ __forceinline__ void restore_row(const DecodeParams& p, const DecodePlace& place, Rows<C>& rows, int half) {
  const int lane = thread_of_cta() % 4;
  const float* const numbers = state_numbers(p, place);
  rows.l[half] = __ldcg(numbers + lane);
  const float reference = __ldcg(numbers + cuda::kOpenReference);
  if (reference != -INFINITY) {
    rows.flags |= Rows<C>::kSeen << half;
    rows.shift[half] = -reference;
  }
  const auto* const outputs = reinterpret_cast<const float4*>(state_of(p, place)) + lane;
#pragma unroll
  for (int n = 0; n < C::kDimV / 16; ++n) {
    const float4 x = __ldcg(outputs + 4 * n);
    rows.o[2 * n][2 * half] = x.x;
    rows.o[2 * n][2 * half + 1] = x.y;
    rows.o[2 * n + 1][2 * half] = x.z;
    rows.o[2 * n + 1][2 * half + 1] = x.w;
  }
}

// The rows of `half` end here. `sum`: of the row. Of a record, `first_column` is where its columns that this thread's
// CTA has begin; the CTA that has the first ones leaves the numbers.
template <class C>
__device__ __forceinline__ void leave_row(const DecodeParams& p, const DecodeUnit& unit, const DecodeSlots& slots,
                                          const Rows<C>& rows, int half, float sum, int first_column = 0) {
  const int lane = thread_of_cta() % 4;
  const float reference = reference_of(rows, half);
  const int slot = slot_of_thread() + 8 * half;
  if (!finishes(p, unit)) {
    leave_columns(left_outputs<C>(p, unit, slot, slots.place[half]) + first_column, rows, half);
    if (lane == 0 && first_column == 0) {
      leave_numbers(p, unit, 0, p.slices, slot, slots.place[half], float2{reference, sum});
    }
    return;
  }
  const FinishedRow<C> finished(p, slots.place[half], reference, sum);
#pragma unroll
  for (int n = 0; n < C::kDimV / 8; ++n) {
    finished.write(8 * n + 2 * lane, rows.o[n][2 * half], rows.o[n][2 * half + 1]);
  }
  if (lane == 0) finished.write_lse();
}

// Four columns of a row, merged over its groups. at(group) is where a group's A and numbers are.
struct MergedColumns {
  float4 outputs{0.0F, 0.0F, 0.0F, 0.0F};
  float reference = -INFINITY;
  float sum = 0.0F;
};
struct PartialAt {
  const float4* outputs;
  const float2* numbers;
};
template <class At>
__device__ __forceinline__ MergedColumns merge_groups(int begin, int end, At at) {
  MergedColumns merged;
  constexpr int kBatch = 8;  // on their way from memory at a time
#pragma unroll 1
  for (int first = begin; first < end; first += kBatch) {
    float4 outputs[kBatch];
    float2 numbers[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= end) break;
      const PartialAt from = at(first + i);
      outputs[i] = __ldcg(from.outputs);
      numbers[i] = __ldcg(from.numbers);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= end) break;
      const float4& x = outputs[i];
      if (first + i == begin) {
        merged = {x, numbers[i].x, numbers[i].y};
        continue;
      }
      const MergeStep step = cuda::merge_rows(merged.reference, merged.sum, numbers[i].x, numbers[i].y, kReferenceUnit);
      merged.reference = step.reference;
      merged.sum = step.sum;
      using Arithmetic = cuda::TensorArithmetic;
      merged.outputs = {Arithmetic::join(merged.outputs.x, x.x, step), Arithmetic::join(merged.outputs.y, x.y, step),
                        Arithmetic::join(merged.outputs.z, x.z, step), Arithmetic::join(merged.outputs.w, x.w, step)};
    }
  }
  return merged;
}

// Finishes what a thread has merged: `share` counts four columns.
template <class C>
__device__ __forceinline__ void write_merged(const DecodeParams& p, const DecodePlace& place, int share,
                                             const MergedColumns& merged) {
  const FinishedRow<C> finished(p, place, merged.reference, merged.sum);
  const int column = share / 4 * 16 + share % 4 * 2;
  finished.write(column, merged.outputs.x, merged.outputs.y);
  finished.write(column + 8, merged.outputs.z, merged.outputs.w);
  if (share == 0) finished.write_lse();
}

// Called by all threads that hold outputs, `thread` among kThreads, once they have left their slice of a unit's
// partials: where it is the last one of the sequence's rows, the slice is merged.
template <class C, int kThreads>
__device__ __forceinline__ void merge_if_last(const DecodeParams& p, const DecodeUnit& unit, int thread, int slice) {
  __threadfence();
  named_sync(kDecodeBarrier, kThreads);
  bool last = false;
  if (thread == 0) {
    const std::int64_t rows = (std::int64_t{unit.sequence} * p.fold.kv_heads + unit.kv_head) * p.blocks + unit.block;
    std::int32_t* const arrived = p.arrived + rows * p.slices + slice;
    last = atomicAdd(arrived, 1) == unit.of.groups - 1;
    if (last) *arrived = 0;  // for the next step
  }
  if (!named_any(kDecodeBarrier, kThreads, last)) return;
  __threadfence();
  const int shares = C::kDimV / 4 / p.slices;
#pragma unroll 1
  for (int i = thread; i < rows_of(p, unit) * shares; i += kThreads) {
    const int slot = i / shares;
    const int share = slice * shares + i % shares;
    const DecodePlace place = place_of(p, unit, slot);
    const RowGroups groups = groups_of<C>(p, unit, place);
    write_merged<C>(p, place, share, merge_groups(groups.begin, groups.end, [&](int group) {
                      const int at = unit.first_number + (group - unit.of.begin_group) * unit.stride;
                      return PartialAt{reinterpret_cast<const float4*>(outputs_of<C>(p, at, slot)) + share,
                                       numbers_of(p, at, slice, slot)};
                    }));
  }
}

}  // namespace ringattn::sm90
