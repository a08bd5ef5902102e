// SPDX-License-Identifier: Apache-2.0
// Vectorized exp2 and tanh in explicit steps, so that a target's bits are fixed by this file. NaN gives NaN (Highway's
// own Exp gives 0). The polynomials are minimax fits of the relative error, with fp32 coefficients.
#if defined(RINGATTN_KERNELS_CPU_MATH_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_MATH_INL_HPP_
#undef RINGATTN_KERNELS_CPU_MATH_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_MATH_INL_HPP_
#endif

#include <limits>

#include "hwy/highway.h"

// g++ 12 warns about undefined operands in its own intrinsics. Highway's headers disable the same warning.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class V>
struct Exp2Factors {
  V mantissa;
  V power;
};

// Factors of 2^x for x in [−126, 127] or NaN: one within [√½, √2], and a power of 2.
template <class D, class V = hn::Vec<D>>
HWY_INLINE Exp2Factors<V> exp2_factors(D d, V x) {
  const hn::Rebind<std::uint32_t, D> du;
  // Adding 1.5 · 2^23 rounds x to the nearest integer n. Adding 127 more makes the low bits the exponent field of 2^n.
  const V magic = hn::Set(d, 12583039.0F);
  const V shifted = hn::Add(x, magic);
  const V fraction = hn::Sub(x, hn::Sub(shifted, magic));  // exact, in [−0.5, 0.5]
  const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, shifted)));
  V p = hn::Set(d, 0x1.416b52p-13F);
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.5f082ep-10F));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.3b2dep-7F));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.c6af7cp-5F));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.ebfbdcp-3F));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.62e43p-1F));
  p = hn::MulAdd(p, fraction, hn::Set(d, 1.0F));
  return {p, power};
}

// 2^x for x in [−126, 127] or NaN. 2^0 is exactly 1; otherwise within 1.1 ulp.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp2_in_range(D d, V x) {
  const auto [mantissa, power] = exp2_factors(d, x);
  return hn::Mul(mantissa, power);
}

// 2^x for any x: 0 below 2^−126, ∞ from 2^127.5 on.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp2(D d, V x) {
  const V highest = hn::Set(d, 128.0F);  // the exponent field of 2^128 is that of ∞
  const V bounded = hn::IfThenElse(hn::Gt(x, highest), highest, x);
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -126.0F)), exp2_in_range(d, bounded));
}

// The softmax weight 2^x of a score with log2 distance x from its softmax offset (at most kMergeRescaleThreshold): 0
// for −∞, NaN for NaN. The weight of a finite score is at least 2^−100. It is not 0 in exact arithmetic either, so ∞ in
// V gives ∞ and not 0 · ∞. The bound also avoids slow subnormals in the sums.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V weight(D d, V x) {
  const V lowest = hn::Set(d, -100.0F);
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  // The same in two instructions fewer: max returns its second operand if one is NaN, and a mask zeroes the product.
  if constexpr (sizeof(V) == sizeof(__m512)) {
    const __mmask16 kept =
        _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-std::numeric_limits<float>::infinity()), _CMP_NEQ_UQ);
    const auto [mantissa, power] = exp2_factors(d, hn::Max(lowest, x));
    return V{_mm512_maskz_mul_ps(kept, mantissa.raw, power.raw)};
  }
#endif
  const V bounded = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);
  return hn::IfThenZeroElse(hn::Eq(x, hn::Set(d, -std::numeric_limits<float>::infinity())), exp2_in_range(d, bounded));
}

// tanh, within 2 ulp; ±1 for ±∞.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V tanh(D d, V x) {
  const V magnitude = hn::Abs(x);
  // |x| < 0.625: x + x³ P(x²).
  const V square = hn::Mul(x, x);
  V p = hn::Set(d, -0x1.750ce2p-8F);
  p = hn::MulAdd(p, square, hn::Set(d, 0x1.51f8cep-6F));
  p = hn::MulAdd(p, square, hn::Set(d, -0x1.b835a4p-5F));
  p = hn::MulAdd(p, square, hn::Set(d, 0x1.1106f6p-3F));
  p = hn::MulAdd(p, square, hn::Set(d, -0x1.555532p-2F));
  const V small = hn::MulAdd(hn::Mul(p, square), x, x);
  // Otherwise 1 − 2 / (e^2|x| + 1), which rounds to 1 from 10 on.
  const V ten = hn::Set(d, 10.0F);
  const V bounded = hn::IfThenElse(hn::Gt(magnitude, ten), ten, magnitude);
  const V exponential = exp2_in_range(d, hn::Mul(bounded, hn::Set(d, 2.88539008F)));
  const V one = hn::Set(d, 1.0F);
  const V large = hn::Sub(one, hn::Div(hn::Set(d, 2.0F), hn::Add(exponential, one)));
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625F)), small, hn::CopySign(large, x));
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // per-target include guard
