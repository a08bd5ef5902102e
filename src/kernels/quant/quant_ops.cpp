// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/quant/quant_ops.hpp"

#include "kernels/quant/row_quantization.hpp"

// As in common/cpu/tile_ops.cpp.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quant/quant_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h.
#include "hwy/highway.h"
#include "kernels/common/unroll.hpp"

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

// Adds to kVectors vectors of columns from `column` on.
template <int kVectors>
HWY_INLINE void add_columns(const double* wide, std::int64_t count, std::int64_t dim, std::int64_t row,
                            std::int64_t column, double* sums) {
  const hn::CappedTag<double, 8> d;
  using Vector = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  Vector sum[kGramRows][kVectors];
  RINGATTN_UNROLL
  for (int r = 0; r < kGramRows; ++r) {
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::LoadU(d, sums + (row + r) * dim + column + v * lanes);
  }
  for (std::int64_t t = 0; t < count; ++t) {
    const double* const token = wide + t * dim;
    Vector factors[kVectors];
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) factors[v] = hn::LoadU(d, token + column + v * lanes);
    RINGATTN_UNROLL
    for (int r = 0; r < kGramRows; ++r) {
      const Vector factor = hn::Set(d, token[row + r]);
      RINGATTN_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(factor, factors[v], sum[r][v]);
    }
  }
  RINGATTN_UNROLL
  for (int r = 0; r < kGramRows; ++r) {
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[r][v], d, sums + (row + r) * dim + column + v * lanes);
  }
}

void add(const double* wide, std::int64_t count, std::int64_t dim, std::int64_t row, double* sums) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(hn::CappedTag<double, 8>()));
  std::int64_t column = row / lanes * lanes;
  for (; column + 2 * lanes <= dim; column += 2 * lanes) add_columns<2>(wide, count, dim, row, column, sums);
  for (; column < dim; column += lanes) add_columns<1>(wide, count, dim, row, column, sums);
}

const GramOps& gram_ops() {
  static const GramOps ops{&add};
  return ops;
}

}  // namespace ringattn::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn {

HWY_EXPORT(codebook_ops);
HWY_EXPORT(gram_ops);

const CodebookOps& best_codebook_ops() { return HWY_DYNAMIC_DISPATCH(codebook_ops)(); }
const GramOps& best_gram_ops() { return HWY_DYNAMIC_DISPATCH(gram_ops)(); }

}  // namespace ringattn
#endif  // HWY_ONCE
