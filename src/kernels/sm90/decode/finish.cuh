// SPDX-License-Identifier: Apache-2.0
// The end of rows: a unit leaves its partials, and whoever leaves the last ones of a sequence's rows merges them, in
// ascending order, by the fold's own step (kernels/merge.hpp).
#pragma once

#include "kernels/cuda/device/merge_arithmetic.cuh"
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

// This thread's share of a row's partial. Columns lie as in a fold state (cuda/device/fold_state.cuh).
template <class C>
__device__ __forceinline__ float4* outputs_of(const DecodeParams& p, int unit, int slot) {
  return reinterpret_cast<float4*>(p.outputs + (std::int64_t{unit} * p.block_rows + slot) * C::kDimV);
}
__device__ __forceinline__ float2* numbers_of(const DecodeParams& p, int unit, int slice, int slot) {
  return p.numbers + ((std::int64_t{unit} * p.slices + slice) * p.block_rows + slot);
}

// The rows of `half` end here, for the threads whose `ends` says so: they are written where the unit's group is its
// sequence's only one, and left as partials else. `sum`: of the row.
template <class C>
__device__ __forceinline__ void leave_row(const DecodeParams& p, const DecodeUnit& unit, const DecodeSlots& slots,
                                          const Rows<C>& rows, int half, float sum) {
  const int lane = thread_of_cta() % 4;
  const float reference = reference_of(rows, half);
  if (unit.of.groups() > 1) {
    const int slot = slot_of_thread() + 8 * half;
    float4* const outputs = outputs_of<C>(p, unit.number, slot);
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      __stcg(outputs + 4 * n + lane, float4{rows.o[2 * n][2 * half], rows.o[2 * n][2 * half + 1],
                                            rows.o[2 * n + 1][2 * half], rows.o[2 * n + 1][2 * half + 1]});
    }
    if (lane != 0) return;
    for (int slice = 0; slice < p.slices; ++slice) {
      __stcg(numbers_of(p, unit.number, slice, slot), float2{reference, sum});
    }
    return;
  }
  const cuda::RowEnd end = end_of_row(p, slots.query_head[half], reference, sum);
  const float factor = end.factor();
#pragma unroll
  for (int n = 0; n < C::kDimV / 8; ++n) {
    write_pair<C>(p, slots.row[half], slots.query_head[half], 8 * n + 2 * lane, rows.o[n][2 * half],
                  rows.o[n][2 * half + 1], factor);
  }
  if (lane == 0) write_lse(p, slots.row[half], slots.query_head[half], end.lse());
}

// Four columns of a row, merged over the groups that the row folds.
template <class C>
__device__ __forceinline__ void merge_columns(const DecodeParams& p, const DecodeUnit& unit, int slice, int slot,
                                              int share) {
  const DecodeRow row = row_of<C>(p, unit, slot);
  const int first = static_cast<int>(row.tiles.begin) / kGroupTiles;
  const int groups = row.tiles.empty() ? 0 : static_cast<int>(row.tiles.end - 1) / kGroupTiles + 1 - first;
  const int number = unit.first_number + (first - unit.of.first_group()) * unit.stride;
  float4 merged{0.0F, 0.0F, 0.0F, 0.0F};
  float reference = -INFINITY;
  float sum = 0.0F;
  constexpr int kBatch = 8;  // on their way from memory at a time
  for (int batch = 0; batch < groups; batch += kBatch) {
    float4 outputs[kBatch];
    float2 numbers[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (batch + i >= groups) break;
      const int at = number + (batch + i) * unit.stride;
      outputs[i] = __ldcg(outputs_of<C>(p, at, slot) + share);
      numbers[i] = __ldcg(numbers_of(p, at, slice, slot));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (batch + i >= groups) break;
      const float4& x = outputs[i];
      if (batch + i == 0) {
        merged = x;
        reference = numbers[i].x;
        sum = numbers[i].y;
        continue;
      }
      const MergeStep step = cuda::merge_rows(reference, sum, numbers[i].x, numbers[i].y, kReferenceUnit);
      reference = step.reference;
      sum = step.sum;
      merged = {cuda::TensorArithmetic::join(merged.x, x.x, step), cuda::TensorArithmetic::join(merged.y, x.y, step),
                cuda::TensorArithmetic::join(merged.z, x.z, step), cuda::TensorArithmetic::join(merged.w, x.w, step)};
    }
  }
  const cuda::RowEnd end = end_of_row(p, row.query_head, reference, sum);
  const float factor = end.factor();
  const int column = share / 4 * 16 + share % 4 * 2;
  write_pair<C>(p, row.row, row.query_head, column, merged.x, merged.y, factor);
  write_pair<C>(p, row.row, row.query_head, column + 8, merged.z, merged.w, factor);
  if (share == 0) write_lse(p, row.row, row.query_head, end.lse());
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
    last = atomicAdd(arrived, 1) == unit.of.groups() - 1;
    if (last) *arrived = 0;  // for the next step
  }
  if (!named_any(kDecodeBarrier, kThreads, last)) return;
  __threadfence();
  const int shares = C::kDimV / 4 / p.slices;
  for (int i = thread; i < rows_of(p, unit) * shares; i += kThreads) {
    merge_columns<C>(p, unit, slice, i / shares, slice * shares + i % shares);
  }
}

}  // namespace ringattn::sm90
