// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/gemm/cpu/gemm_ops.hpp"

#include <algorithm>
#include <cstring>

// As in tile_ops.cpp.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/cpu/gemm_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway wants it.
#include "hwy/highway.h"
#include "kernels/common/cpu/pack-inl.hpp"
#include "kernels/gemm/cpu/gemm-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

template <Dtype kDtype>
void pack_matrix(const GemmMatrix& matrix, float* panels) {
  constexpr auto kWidth = static_cast<std::int64_t>(kPanelWidth);
  constexpr auto kElement = static_cast<std::int64_t>(size_of(kDtype));
  const auto panel_of = [&](std::int64_t column) {
    return panels + (column / kWidth * kWidth) * matrix.dim_k + column % kWidth;
  };
  if (matrix.k_stride == kElement) {
    for (std::int64_t column = 0; column < matrix.dim_n; column += kKeysAtOnce) {
      const std::byte* rows[kKeysAtOnce];
      for (std::int64_t i = 0; i < kKeysAtOnce; ++i) rows[i] = matrix.data + (column + i) * matrix.n_stride;
      transpose<kDtype>(rows, static_cast<std::size_t>(matrix.dim_k), kPanelWidth, panel_of(column));
    }
  } else {
    const AtMostEight d;
    for (std::int64_t i = 0; i < matrix.dim_k; ++i) {
      const std::byte* const row = matrix.data + i * matrix.k_stride;
      for (std::int64_t column = 0; column < matrix.dim_n; column += static_cast<std::int64_t>(hn::Lanes(d))) {
        hn::Store(load_wide<kDtype>(d, row, static_cast<std::size_t>(column)), d, panel_of(column) + i * kWidth);
      }
    }
  }
  if (matrix.dim_n % kWidth == 0) return;
  for (std::int64_t i = 0; i < matrix.dim_k; ++i) {
    std::fill_n(panel_of(matrix.dim_n) + i * kWidth, kWidth - matrix.dim_n % kWidth, 0.0F);
  }
}

void pack_gemm(const GemmMatrix& matrix, float* panels) {
  switch (matrix.dtype) {
    case Dtype::kF32:
      return pack_matrix<Dtype::kF32>(matrix, panels);
    case Dtype::kBf16:
      return pack_matrix<Dtype::kBf16>(matrix, panels);
    case Dtype::kF16:
      return pack_matrix<Dtype::kF16>(matrix, panels);
  }
}

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

template <Dtype kDtype>
void multiply_as(const GemmRows& rows, std::int64_t dim_n, std::int64_t dim_k, const float* panels) {
  const auto depth = static_cast<std::size_t>(dim_k);
  const auto columns = static_cast<std::size_t>(dim_n);
  for (std::size_t column = 0; column < columns; column += kPanelWidth) {
    multiply<kPanelVectors>(
        {rows.rows, depth, panels + column * depth, depth}, static_cast<std::size_t>(rows.count),
        StoreRounded<kDtype>{rows.out + column * size_of(kDtype), rows.out_stride, columns - column});
  }
}

void multiply_gemm(const GemmRows& rows, std::int64_t dim_n, std::int64_t dim_k, const float* panels) {
  switch (rows.dtype) {
    case Dtype::kF32:
      return multiply_as<Dtype::kF32>(rows, dim_n, dim_k, panels);
    case Dtype::kBf16:
      return multiply_as<Dtype::kBf16>(rows, dim_n, dim_k, panels);
    case Dtype::kF16:
      return multiply_as<Dtype::kF16>(rows, dim_n, dim_k, panels);
  }
}

const GemmOps& gemm_ops() {
  static const GemmOps ops{static_cast<int>(kPanelWidth), &pack_gemm, &multiply_gemm};
  return ops;
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::cpu {

HWY_EXPORT(gemm_ops);

const GemmOps& best_gemm_ops() { return HWY_DYNAMIC_DISPATCH(gemm_ops)(); }

}  // namespace ringattn::cpu
#endif  // HWY_ONCE
