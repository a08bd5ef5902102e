// SPDX-License-Identifier: Apache-2.0
// The merge step (kernels/attention/merge.hpp) of one row. A weight is at least 2^−100, as within a tile
// (math-inl.hpp), so ∞ stays ∞ however far a split's scores are below those of another.
#if defined(RINGATTN_KERNELS_CPU_MERGE_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_MERGE_INL_HPP_
#undef RINGATTN_KERNELS_CPU_MERGE_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_MERGE_INL_HPP_
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/attention/merge.hpp"
#include "kernels/common/cpu/math-inl.hpp"
#include "kernels/common/cpu/tile_ops.hpp"
#include "kernels/gemm/cpu/gemm-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

inline float weight_of(float x) {
  const Floats d;
  return hn::GetLane(weight(d, hn::Set(d, x)));
}

inline void merge(int head_dim_v, const Partial& partial, Partial& row) {
  const MergeStep step = merge_step(row.offset, row.sum, partial.offset, partial.sum, kLog2E, weight_of);
  row.offset = step.softmax_offset;
  row.sum = step.sum;
  const Floats d;
  const FloatVector kept = hn::Set(d, step.state_scale);  // 1 if not rescaled: exact
  const FloatVector factor = hn::Set(d, step.partial_scale);
  const auto merged = [&](FloatVector before, FloatVector of_partial)
                          HWY_ATTR { return hn::MulAdd(of_partial, factor, hn::Mul(before, kept)); };
  const auto count = static_cast<std::size_t>(head_dim_v);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(merged(hn::LoadU(d, row.acc + i), hn::LoadU(d, partial.acc + i)), d, row.acc + i);
  }
  if (i == count) return;
  HWY_ALIGN float before[kLanes] = {};
  HWY_ALIGN float of_partial[kLanes] = {};
  std::copy(row.acc + i, row.acc + count, before);
  std::copy(partial.acc + i, partial.acc + count, of_partial);
  hn::Store(merged(hn::Load(d, before), hn::Load(d, of_partial)), d, before);
  std::copy_n(before, count - i, row.acc + i);
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
