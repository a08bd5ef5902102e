// SPDX-License-Identifier: Apache-2.0
// Row arithmetic of sm80_simt (simt.cu): the compiled shapes, and a row's online softmax from its state to its
// results.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/merge_arithmetic.cuh"
#include "kernels/attention/cuda/row_end.cuh"
#include "kernels/attention/cuda/simt.hpp"
#include "kernels/attention/visibility.hpp"

namespace ringattn::cuda::simt {

inline constexpr int kStepKeys = 32;  // one key per lane
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

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}

// Shape of a kernel for head dims up to kMax_. The wider shape keeps 128 columns of K and V in shared memory at a time,
// so that it runs on every device from sm_80 on.
template <int kMax_>
struct SimtShape {
  static constexpr int kMax = kMax_;
  static constexpr int kDimsOfLane = kMax / 32;
  static constexpr int kColumns = kMax <= 256 ? kMax : 128;  // maximum columns of K and V in shared memory at a time
  static constexpr int kColumnBlocks = kMax / kColumns;
  static constexpr int kCtas = kMax <= 256 ? 3 : 2;  // resident CTAs per multiprocessor

  __host__ __device__ static constexpr int columns(int dim) { return dim < kColumns ? dim : kColumns; }
  // Bytes of the buffers of Shared.
  static constexpr std::size_t shared_bytes(int head_dim, int head_dim_v) {
    return static_cast<std::size_t>(kSimtTileRows * (head_dim + head_dim_v) +
                                    kStepKeys * (columns(head_dim) + 1 + columns(head_dim_v))) *
           sizeof(float);
  }
};
using NarrowShape = SimtShape<256>;
using WideShape = SimtShape<kSimtMaxHeadDim>;
static_assert(WideShape::shared_bytes(WideShape::kMax, WideShape::kMax) + 256 <= 99 * 1024);

// Buffers in shared memory: q [16, head_dim], k [32, columns + 1], v [32, columns], and the merged outputs of the rows
// [16, head_dim_v]. The extra float keeps a column of k in different banks.
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

// A row's state in registers: offsets and sums are in every lane, lane `lane` has outputs [lane + 32 i].
template <class C>
struct SimtRow {
  int flags;  // flags of the partials that are present: kHasCurrent, kHasMerged
  float m;    // of the current KV split: offset (the exact row maximum), sum and outputs
  float l;
  float o[C::kDimsOfLane];
  float merged_m;  // of the merged splits
  float merged_l;
  float* merged_o;  // [head_dim_v] in shared memory; a lane accesses only its own columns
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

// Resets the current KV split to the empty partial.
template <class C>
__device__ void begin_split(SimtRow<C>& row) {
  row.m = -INFINITY;
  row.l = 0.0F;
#pragma unroll
  for (int i = 0; i < C::kDimsOfLane; ++i) row.o[i] = 0.0F;
}

// Merges the current KV split into the splits before it.
template <class C>
__device__ void merge_current_split(const AttentionParams& p, SimtRow<C>& row) {
  if ((row.flags & kHasCurrent) == 0) return;
  const bool merges = (row.flags & kHasMerged) != 0;
  MergeStep step{};
  if (merges) step = SimtArithmetic::merge(row.merged_m, row.merged_l, row.m, row.l, kLog2E);
  for_each_output<C>(p, [&](int i, int dim) {
    row.merged_o[dim] = merges ? SimtArithmetic::join(row.merged_o[dim], row.o[i], step) : row.o[i];
  });
  row.merged_m = merges ? step.softmax_offset : row.m;
  row.merged_l = merges ? step.sum : row.l;
  row.flags = kHasMerged;
  begin_split(row);
}

template <class C>
__device__ void load_row(const AttentionParams& p, std::int64_t at, int head, SimtRow<C>& row) {
  const StatePtrs state_ptrs(p.state.memory, p.rows, p.heads, p.head_dim_v, at, head);
  row.flags = static_cast<int>(state_ptrs.stats[kStateFlags]);
  if ((row.flags & kHasCurrent) != 0) {
    row.m = state_ptrs.stats[kCurrentOffset];
    row.l = state_ptrs.stats[0];  // the other partial sums are 0
    for_each_output<C>(p, [&](int i, int dim) { row.o[i] = state_ptrs.current[state_column(dim, p.head_dim_v)]; });
  }
  if ((row.flags & kHasMerged) != 0) {
    row.merged_m = state_ptrs.stats[kMergedOffset];
    row.merged_l = state_ptrs.stats[kMergedSum];
    for_each_output<C>(p,
                       [&](int, int dim) { row.merged_o[dim] = state_ptrs.merged[state_column(dim, p.head_dim_v)]; });
  }
}

template <class C>
__device__ void save_row(const AttentionParams& p, std::int64_t at, int head, const SimtRow<C>& row) {
  const StatePtrs state_ptrs(p.state.memory, p.rows, p.heads, p.head_dim_v, at, head);
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kCurrentOffset; ++i) state_ptrs.stats[i] = i == 0 ? row.l : 0.0F;
    state_ptrs.stats[kCurrentOffset] = row.m;
    state_ptrs.stats[kMergedOffset] = row.merged_m;
    state_ptrs.stats[kMergedSum] = row.merged_l;
    state_ptrs.stats[kStateFlags] = static_cast<float>(row.flags);
  }
  if ((row.flags & kHasCurrent) != 0) {
    for_each_output<C>(p, [&](int i, int dim) { state_ptrs.current[state_column(dim, p.head_dim_v)] = row.o[i]; });
  }
  if ((row.flags & kHasMerged) != 0) {
    for_each_output<C>(p,
                       [&](int, int dim) { state_ptrs.merged[state_column(dim, p.head_dim_v)] = row.merged_o[dim]; });
  }
}

// A row's softmax of one step of 32 keys.
struct RowStep {
  ColumnRange seen;  // columns of the 32 keys that the row sees; if empty, the step is skipped
  float product;     // q · k of the row and the lane's key
  float weight;      // of the lane's key
  float scale;       // factor of the row's sums so far

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

// Turns scores into weights, and updates the row's offset and sum.
template <class C>
__device__ void weigh_keys(const AttentionParams& p, SimtRow<C>& row, RowStep& step) {
  const float x = step.sees(static_cast<int>(threadIdx.x) % 32) ? score(p, step.product) : -INFINITY;
  const float m = fmaxf(row.m, warp_max(x));               // passes NaN over, but its weight is NaN
  const float softmax_offset = m == -INFINITY ? 0.0F : m;  // if −∞, every score so far is −∞ and weighs 0
  // The difference is taken first, so that an unchanged maximum scales by exactly 1.
  step.scale = weight(__fsub_rn(row.m, softmax_offset));
  step.weight = weight(__fsub_rn(x, softmax_offset));
  row.flags |= kHasCurrent;
  row.m = m;
  row.l = __fmaf_rn(row.l, step.scale, warp_sum(step.weight));
}

// Adds the products with V's columns [kFirst, kFirst + C::kColumns). `v` has rows of `pitch` floats per key.
template <class C, int kFirst>
__device__ void add_values(const AttentionParams& p, SimtRow<C>& row, const RowStep& step, const float* v, int pitch) {
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

// Merges, normalizes, rounds and writes a row.
template <class C>
__device__ void finish_row(const AttentionParams& p, SimtRow<C>& row, std::int64_t at, int head) {
  const bool merged = (row.flags & kHasMerged) != 0;
  if (merged) merge_current_split(p, row);  // else the current split is the only one, or the row is empty
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

}  // namespace ringattn::cuda::simt
