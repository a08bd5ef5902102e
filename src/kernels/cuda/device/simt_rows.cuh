// SPDX-License-Identifier: Apache-2.0
// The rows of sm80_simt (simt.cu): the shapes that it is compiled for, and a row's arithmetic from its state to its
// results.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/cuda/attention_params.hpp"
#include "kernels/cuda/device/merge_arithmetic.cuh"
#include "kernels/cuda/device/row_end.cuh"
#include "kernels/cuda/device/simt.hpp"
#include "kernels/visibility.hpp"

namespace ringattn::cuda::plain {

inline constexpr int kStepKeys = 32;  // a lane each
inline constexpr int kWarps = 4;
inline constexpr int kRowsOfWarp = kSimtTileRows / kWarps;
inline constexpr unsigned kAllLanes = 0xffffffffU;

__device__ inline float element(const void* data, int dtype, std::int64_t index) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kF32:
      return static_cast<const float*>(data)[index];
    case Dtype::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return __half2float(static_cast<const __half*>(data)[index]);
  }
}
__device__ inline void store(void* data, int dtype, std::int64_t index, float value) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kF32:
      static_cast<float*>(data)[index] = value;
      break;
    case Dtype::kBf16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<__half*>(data)[index] = __float2half_rn(value);
  }
}

// exp(x) of a difference of scores.
__device__ inline float weight(float x) { return SimtArithmetic::weight(__fmul_rn(x, kLog2E)); }

__device__ inline float sum_of_lanes(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}
__device__ inline float greatest_of_lanes(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}

// A kernel for head dims up to kMax_. Wider ones have 128 columns of K and V in shared memory at a time, so that they
// run on every device from sm_80 on.
template <int kMax_>
struct Plain {
  static constexpr int kMax = kMax_;
  static constexpr int kDimsOfLane = kMax / 32;
  static constexpr int kColumns = kMax <= 256 ? kMax : 128;  // of K and V in shared memory at a time, at most
  static constexpr int kPieces = kMax / kColumns;
  static constexpr int kCtas = kMax <= 256 ? 3 : 2;  // of a multiprocessor

  __host__ __device__ static constexpr int columns(int dim) { return dim < kColumns ? dim : kColumns; }
  // As Shared has it, below.
  static constexpr std::size_t shared_bytes(int head_dim, int head_dim_v) {
    return static_cast<std::size_t>(kSimtTileRows * (head_dim + head_dim_v) +
                                    kStepKeys * (columns(head_dim) + 1 + columns(head_dim_v))) *
           sizeof(float);
  }
};
using Narrow = Plain<256>;
using Wide = Plain<kSimtMaxHeadDim>;
static_assert(Wide::shared_bytes(Wide::kMax, Wide::kMax) + 256 <= 99 * 1024);

// In shared memory: q [16, head_dim], k [32, columns + 1], v [32, columns]; the extra float keeps a column of k in
// different banks. And of each row the outputs of its closed groups, [16, head_dim_v].
template <class C>
struct Shared {
  float* q;
  float* k;
  float* v;
  float* merged;

  __device__ Shared(float* memory, const AttentionParams& p)
      : q(memory),
        k(q + kSimtTileRows * p.head_dim),
        v(k + kStepKeys * (C::columns(p.head_dim) + 1)),
        merged(v + kStepKeys * C::columns(p.head_dim_v)) {}
};

// One row on its way: softmax_offsets and sums in every lane, outputs [lane + 32 i] in a lane.
template <class C>
struct Row {
  int parts;  // of the two below, which are there: kHasCurrent, kHasMerged
  float m;    // of the open group
  float l;
  float o[C::kDimsOfLane];
  float merged_m;  // of the groups before it
  float merged_l;
  float* merged_o;  // [head_dim_v] in shared memory, where a lane reads and writes its own only
};

// Calls visit(i, dim) for each output of the lane.
template <class C, class Visit>
__device__ __forceinline__ void for_each_output(const AttentionParams& p, Visit visit) {
#pragma unroll
  for (int i = 0; i < C::kDimsOfLane; ++i) {
    const int dim = static_cast<int>(threadIdx.x) % 32 + 32 * i;
    if (dim < p.head_dim_v) visit(i, dim);
  }
}

// The identity, from which a group begins.
template <class C>
__device__ void begin_split(Row<C>& row) {
  row.m = -INFINITY;
  row.l = 0.0F;
#pragma unroll
  for (int i = 0; i < C::kDimsOfLane; ++i) row.o[i] = 0.0F;
}

// The open group joins those before it.
template <class C>
__device__ void merge_current_split(const AttentionParams& p, Row<C>& row) {
  if ((row.parts & kHasCurrent) == 0) return;
  const bool joins = (row.parts & kHasMerged) != 0;
  MergeStep step{};
  if (joins) step = SimtArithmetic::merge(row.merged_m, row.merged_l, row.m, row.l, kLog2E);
  for_each_output<C>(p, [&](int i, int dim) {
    row.merged_o[dim] = joins ? SimtArithmetic::join(row.merged_o[dim], row.o[i], step) : row.o[i];
  });
  row.merged_m = joins ? step.softmax_offset : row.m;
  row.merged_l = joins ? step.sum : row.l;
  row.parts = kHasMerged;
  begin_split(row);
}

template <class C>
__device__ void load_row(const AttentionParams& p, std::int64_t at, int head, Row<C>& row) {
  const StatePtrs state_ptrs(p.state.memory, p.rows, p.heads, p.head_dim_v, at, head);
  row.parts = static_cast<int>(state_ptrs.stats[kStateFlags]);
  if ((row.parts & kHasCurrent) != 0) {
    row.m = state_ptrs.stats[kCurrentOffset];
    row.l = state_ptrs.stats[0];  // the other partial sums are 0
    for_each_output<C>(p, [&](int i, int dim) { row.o[i] = state_ptrs.current[state_column(dim, p.head_dim_v)]; });
  }
  if ((row.parts & kHasMerged) != 0) {
    row.merged_m = state_ptrs.stats[kMergedOffset];
    row.merged_l = state_ptrs.stats[kMergedSum];
    for_each_output<C>(p,
                       [&](int, int dim) { row.merged_o[dim] = state_ptrs.merged[state_column(dim, p.head_dim_v)]; });
  }
}

template <class C>
__device__ void save_row(const AttentionParams& p, std::int64_t at, int head, const Row<C>& row) {
  const StatePtrs state_ptrs(p.state.memory, p.rows, p.heads, p.head_dim_v, at, head);
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kCurrentOffset; ++i) state_ptrs.stats[i] = i == 0 ? row.l : 0.0F;
    state_ptrs.stats[kCurrentOffset] = row.m;
    state_ptrs.stats[kMergedOffset] = row.merged_m;
    state_ptrs.stats[kMergedSum] = row.merged_l;
    state_ptrs.stats[kStateFlags] = static_cast<float>(row.parts);
  }
  if ((row.parts & kHasCurrent) != 0) {
    for_each_output<C>(p, [&](int i, int dim) { state_ptrs.current[state_column(dim, p.head_dim_v)] = row.o[i]; });
  }
  if ((row.parts & kHasMerged) != 0) {
    for_each_output<C>(p,
                       [&](int, int dim) { state_ptrs.merged[state_column(dim, p.head_dim_v)] = row.merged_o[dim]; });
  }
}

// A row in one step of keys.
struct StepOfRow {
  ColumnRange seen;  // columns of the 32 that the row sees; none: the step is left out
  float product;     // of the row and the lane's key
  float weight;      // of the lane's key
  float scale;       // of the row's sums so far

  __device__ bool sees(int lane) const { return lane >= seen.begin && lane < seen.end; }
};

// Adds the products of `dims` columns.
__device__ inline float add_qk(float sum, const float* q, const float* k, int dims) {
  for (int dim = 0; dim < dims; ++dim) sum = __fmaf_rn(q[dim], k[dim], sum);
  return sum;
}

__device__ inline float score(const AttentionParams& p, float product) {
  const float s = __fmul_rn(product, p.softmax.scale);
  return p.softmax.cap > 0.0F ? __fmul_rn(p.softmax.cap, tanhf(__fdiv_rn(s, p.softmax.cap))) : s;
}

// Scores become weights, and the row's softmax_offset and sum move on.
template <class C>
__device__ void weigh_keys(const AttentionParams& p, Row<C>& row, StepOfRow& step) {
  const float x = step.sees(static_cast<int>(threadIdx.x) % 32) ? score(p, step.product) : -INFINITY;
  const float m = fmaxf(row.m, greatest_of_lanes(x));      // passes NaN over: its weight is NaN
  const float softmax_offset = m == -INFINITY ? 0.0F : m;  // every score so far is −∞ and weighs 0
  // The difference first: an unchanged maximum scales by exactly 1.
  step.scale = weight(__fsub_rn(row.m, softmax_offset));
  step.weight = weight(__fsub_rn(x, softmax_offset));
  row.parts |= kHasCurrent;
  row.m = m;
  row.l = __fmaf_rn(row.l, step.scale, sum_of_lanes(step.weight));
}

// Adds the values' columns [kFirst, kFirst + C::kColumns), as far as there are any, which lie at `v`, `pitch` a key.
template <class C, int kFirst>
__device__ void add_values(const AttentionParams& p, Row<C>& row, const StepOfRow& step, const float* v, int pitch) {
  constexpr int kDims = C::kColumns / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum[kDims] = {};
  for (int key = step.seen.begin; key < step.seen.end; ++key) {
    const float weight_of_key = __shfl_sync(kAllLanes, step.weight, key);
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      if (kFirst + lane + 32 * i < p.head_dim_v) {
        sum[i] = __fmaf_rn(weight_of_key, v[key * pitch + lane + 32 * i], sum[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    float& o = row.o[kFirst / 32 + i];
    o = __fmaf_rn(o, step.scale, __fadd_rn(sum[i], 0.0F));
  }
}

// Merges, divides, q_stages and writes.
template <class C>
__device__ void finish_row(const AttentionParams& p, Row<C>& row, std::int64_t at, int head) {
  const bool merged = (row.parts & kHasMerged) != 0;
  if (merged) merge_current_split(p, row);  // else the open group is the only one, or the identity
  const float* const sink = p.sinks != nullptr ? p.sinks + head : nullptr;
  const RowEnd end =
      end_row(merged ? row.merged_m : row.m, merged ? row.merged_l : row.l, sink, [](float x) { return weight(x); });
  const std::int64_t out = at * p.out.token_stride + head * p.out.head_stride;
  for_each_output<C>(p, [&](int i, int dim) {
    const float o = merged ? row.merged_o[dim] : row.o[i];
    store(p.out.data, p.dtype, out + dim, __fdiv_rn(__fmul_rn(o, end.weight), end.divisor()));
  });
  if (p.lse.data != nullptr && threadIdx.x % 32 == 0) {
    p.lse.data[at * p.lse.token_stride + head * p.lse.head_stride] = end.lse();
  }
}

}  // namespace ringattn::cuda::plain
