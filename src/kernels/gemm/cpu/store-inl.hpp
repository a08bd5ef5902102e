// SPDX-License-Identifier: Apache-2.0
// Rounds fp32 sums to an output dtype and stores them, vectorized, with one canonical NaN.
#if defined(RINGATTN_KERNELS_CPU_STORE_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_STORE_INL_HPP_
#undef RINGATTN_KERNELS_CPU_STORE_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_STORE_INL_HPP_
#endif

#include <cstring>

#include "base/dtype.hpp"
#include "kernels/gemm/cpu/gemm-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

// Rounds sums to nearest even, and stores those that are columns of the matrix.
template <Dtype kDtype>
struct StoreRounded {
  std::byte* out;  // at the panel's first column
  std::int64_t stride;
  std::size_t columns;  // from the panel's first column on

  HWY_INLINE void operator()(std::size_t row, std::size_t column, FloatVector sum) const {
    if (column >= columns) return;
    std::byte* const at = out + static_cast<std::int64_t>(row) * stride + column * size_of(kDtype);
    if constexpr (kDtype == Dtype::kF32) {
      const Floats d;
      put(d, hn::IfThenElse(hn::IsNaN(sum), hn::BitCast(d, hn::Set(Bits(), 0x7fc00000U)), sum), columns - column, at);
    } else {
      const hn::Rebind<std::uint16_t, Floats> d16;
      const hn::Rebind<std::int32_t, Floats> d32;
      put(d16, hn::DemoteTo(d16, hn::BitCast(d32, rounded(sum))), columns - column, at);
    }
  }

 private:
  using Bits = hn::Rebind<std::uint32_t, Floats>;

  template <class D>
  static HWY_INLINE void put(D d, hn::Vec<D> values, std::size_t count, std::byte* at) {
    using Element = hn::TFromD<D>;
    if (count >= kLanes) {
      hn::StoreU(values, d, reinterpret_cast<Element*>(at));
      return;
    }
    HWY_ALIGN Element lanes[kLanes];
    hn::Store(values, d, lanes);
    std::memcpy(at, lanes, count * sizeof(Element));
  }

  // The 16-bit patterns, in 32 bits each. As float_to_bf16() and float_to_f16(), but with one canonical NaN.
  static HWY_INLINE hn::Vec<Bits> rounded(FloatVector sum) {
    const Floats d;
    const Bits d32;
    const auto bits = hn::BitCast(d32, sum);
    if constexpr (kDtype == Dtype::kBf16) {
      const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1U));
      const auto nearest = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffU))));
      return hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(sum)), hn::Set(d32, 0x7fc0U), nearest);
    } else {
      const auto magnitude = hn::And(bits, hn::Set(d32, 0x7fffffffU));
      const auto sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
      // The exponent is 112 less in fp16. Rounding may carry into it, up to ∞ and beyond.
      const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d32, 1U));
      const auto moved = hn::Sub(hn::Add(magnitude, hn::Add(odd, hn::Set(d32, 0xfffU))), hn::Set(d32, 112U << 23));
      const auto normal = hn::Min(hn::ShiftRight<13>(moved), hn::Set(d32, 0x7c00U));
      // Below 2⁻¹⁴ fp16 has steps of 2⁻²⁴, as fp32 has from 1/2 to 1: the addition rounds.
      const auto half = hn::Set(d, 0.5F);
      const auto shifted = hn::BitCast(d32, hn::Add(hn::BitCast(d, magnitude), half));
      const auto subnormal = hn::Sub(shifted, hn::BitCast(d32, half));
      const auto is_subnormal = hn::Lt(magnitude, hn::Set(d32, 113U << 23));
      const auto nearest = hn::Or(sign, hn::IfThenElse(is_subnormal, subnormal, normal));
      return hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(sum)), hn::Set(d32, 0x7e00U), nearest);
    }
  }
};

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
