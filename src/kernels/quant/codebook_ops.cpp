// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/quant/codebook_ops.hpp"

#include "kernels/quant/row_quantization.hpp"

// As in common/cpu/tile_ops.cpp.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quant/codebook_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ringattn::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

int nearest(const float* element, const float* vectors, int width) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  using Floats = hn::Vec<decltype(d)>;
  constexpr auto kLanes = static_cast<int>(hn::MaxLanes(d));
  static_assert(kCodebookVectors % kLanes == 0);
  // Each lane keeps the nearest of every kLanes-th vector.
  Floats least = hn::Zero(d);
  hn::Vec<decltype(di)> first = hn::Zero(di);
  for (int v = 0; v < kCodebookVectors; v += kLanes) {
    Floats sum = hn::Zero(d);
    for (int i = 0; i < width; ++i) {
      const Floats difference = hn::Sub(hn::Set(d, element[i]), hn::LoadU(d, vectors + i * kCodebookVectors + v));
      sum = hn::Add(sum, hn::Mul(difference, difference));
    }
    if (v == 0) {
      least = sum;
      continue;
    }
    const auto nearer = hn::Lt(sum, least);
    least = hn::IfThenElse(nearer, sum, least);
    first = hn::IfThenElse(hn::RebindMask(di, nearer), hn::Set(di, v), first);
  }
  HWY_ALIGN float distances[kLanes];
  HWY_ALIGN std::int32_t begins[kLanes];
  hn::Store(least, d, distances);
  hn::Store(first, di, begins);
  int found = begins[0];
  float distance = distances[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    const int vector = begins[lane] + lane;
    if (distances[lane] < distance || (distances[lane] == distance && vector < found)) {
      found = vector;
      distance = distances[lane];
    }
  }
  return found;
}

const CodebookOps& codebook_ops() {
  static const CodebookOps ops{&nearest};
  return ops;
}

}  // namespace ringattn::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn {

HWY_EXPORT(codebook_ops);

const CodebookOps& best_codebook_ops() { return HWY_DYNAMIC_DISPATCH(codebook_ops)(); }

}  // namespace ringattn
#endif  // HWY_ONCE
