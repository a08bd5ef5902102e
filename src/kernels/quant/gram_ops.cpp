// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/quant/gram_ops.hpp"

// As in common/cpu/tile_ops.cpp.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quant/gram_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h.
#include "hwy/highway.h"
#include "kernels/common/unroll.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

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

HWY_EXPORT(gram_ops);

const GramOps& best_gram_ops() { return HWY_DYNAMIC_DISPATCH(gram_ops)(); }

}  // namespace ringattn
#endif  // HWY_ONCE
