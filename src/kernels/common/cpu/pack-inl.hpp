// SPDX-License-Identifier: Apache-2.0
// Widening to fp32 and packing of a key tile, vectorized. All conversions are exact, also for NaN and subnormals.
#if defined(RINGATTN_KERNELS_CPU_PACK_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_PACK_INL_HPP_
#undef RINGATTN_KERNELS_CPU_PACK_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_PACK_INL_HPP_
#endif

#include <algorithm>
#include <limits>

#include "hwy/highway.h"
#include "kernels/common/cpu/amx_pairs-inl.hpp"
#include "kernels/common/cpu/tile_ops.hpp"
#include "kernels/common/unroll.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using AtMostEight = hn::CappedTag<float, 8>;  // its lane count divides every head_dim

// One vector of elements `index`, index + 1, … of a row.
template <Dtype kDtype, class D>
HWY_INLINE hn::Vec<D> load_wide(D d, const std::byte* row, std::size_t index) {
  if constexpr (kDtype == Dtype::kF32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + index);
  } else {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::Rebind<std::uint32_t, D> d32;
    const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(row) + index));
    if constexpr (kDtype == Dtype::kBf16) return hn::BitCast(d, hn::ShiftLeft<16>(bits));
    // fp16: after its fields are moved into place, the exponent is 112 too small. An exact multiplication corrects it,
    // also for subnormals. ∞ and NaN get fp32's largest exponent instead.
    const auto magnitude = hn::And(bits, hn::Set(d32, 0x7fffU));
    const auto sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
    const auto moved = hn::ShiftLeft<13>(magnitude);
    const auto finite = hn::BitCast(d32, hn::Mul(hn::BitCast(d, moved), hn::Set(d, 0x1p112F)));
    const auto special = hn::Or(moved, hn::Set(d32, 0x7f800000U));
    const auto is_special = hn::Gt(magnitude, hn::Set(d32, 0x7bffU));
    return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(is_special, special, finite)));
  }
}

// Rounds to nearest even in kDtype, and widens again.
template <Dtype kDtype, class D>
HWY_INLINE hn::Vec<D> round_to(D d, hn::Vec<D> value) {
  if constexpr (kDtype == Dtype::kF32) {
    return value;
  } else {
    constexpr int kDropped = kDtype == Dtype::kBf16 ? 16 : 13;  // bits of the mantissa
    const hn::Rebind<std::uint32_t, D> d32;
    const auto bits = hn::BitCast(d32, value);
    const auto odd = hn::And(hn::ShiftRight<kDropped>(bits), hn::Set(d32, 1U));
    const auto nearest = hn::Add(bits, hn::Add(odd, hn::Set(d32, (1U << (kDropped - 1)) - 1)));
    auto rounded = hn::BitCast(d, hn::AndNot(hn::Set(d32, (1U << kDropped) - 1), nearest));
    if constexpr (kDtype == Dtype::kF16) {
      const auto magnitude = hn::Abs(value);
      const auto infinity = hn::Set(d, std::numeric_limits<float>::infinity());
      rounded = hn::IfThenElse(hn::Ge(magnitude, hn::Set(d, 65520.0F)), hn::CopySign(infinity, value), rounded);
      // Below 2⁻¹⁴ fp16 has steps of 2⁻²⁴, as fp32 has from 1/2 to 1: the addition rounds.
      const auto half = hn::Set(d, 0.5F);
      const auto subnormal = hn::CopySign(hn::Sub(hn::Add(magnitude, half), half), value);
      rounded = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0x1p-14F)), subnormal, rounded);
    }
    // The addition may have carried a NaN's mantissa into its exponent and sign.
    return hn::IfThenElse(hn::IsNaN(value), value, rounded);
  }
}

#if HWY_TARGET == HWY_SCALAR
inline constexpr std::int64_t kKeysAtOnce = 1;
#else
inline constexpr std::int64_t kKeysAtOnce = 4;
#endif

// Transposes kKeysAtOnce rows to columns of a panel.
template <Dtype kDtype>
HWY_INLINE void transpose(const std::byte* const* rows, std::size_t dims, std::size_t panel_width, float* target) {
#if HWY_TARGET == HWY_SCALAR
  const hn::ScalableTag<float> d;
  for (std::size_t c = 0; c < dims; ++c) hn::Store(load_wide<kDtype>(d, rows[0], c), d, target + c * panel_width);
#else
  const hn::FixedTag<float, 4> d;
  for (std::size_t c = 0; c < dims; c += 4) {
    const auto r0 = load_wide<kDtype>(d, rows[0], c);
    const auto r1 = load_wide<kDtype>(d, rows[1], c);
    const auto r2 = load_wide<kDtype>(d, rows[2], c);
    const auto r3 = load_wide<kDtype>(d, rows[3], c);
    const auto even_low = hn::InterleaveLower(d, r0, r2);
    const auto even_high = hn::InterleaveUpper(d, r0, r2);
    const auto odd_low = hn::InterleaveLower(d, r1, r3);
    const auto odd_high = hn::InterleaveUpper(d, r1, r3);
    float* at = target + c * panel_width;
    hn::Store(hn::InterleaveLower(d, even_low, odd_low), d, at);
    hn::Store(hn::InterleaveUpper(d, even_low, odd_low), d, at + panel_width);
    hn::Store(hn::InterleaveLower(d, even_high, odd_high), d, at + 2 * panel_width);
    hn::Store(hn::InterleaveUpper(d, even_high, odd_high), d, at + 3 * panel_width);
  }
#endif
}

// Transposes kPackedKeys rows to columns of a panel. Stops after the dims that fill squares of vectors, and returns
// their number.
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX3
inline constexpr std::int64_t kPackedKeys = kTileRows;

template <Dtype kDtype>
HWY_INLINE std::size_t transpose_squares(const std::byte* const* rows, std::size_t dims, std::size_t panel_width,
                                         float* target) {
  const hn::ScalableTag<float> d;
  const std::size_t whole = dims / kTileColumns * kTileColumns;
  for (std::size_t c = 0; c < whole; c += kTileColumns) {
    __m512i square[kTileRows];
    RINGATTN_UNROLL
    for (int i = 0; i < kTileRows; ++i) square[i] = _mm512_castps_si512(load_wide<kDtype>(d, rows[i], c).raw);
    transpose_pairs(square, reinterpret_cast<std::byte*>(target + c * panel_width), panel_width * sizeof(float));
  }
  return whole;
}
#else
inline constexpr std::int64_t kPackedKeys = kKeysAtOnce;

template <Dtype kDtype>
HWY_INLINE std::size_t transpose_squares(const std::byte* const*, std::size_t, std::size_t, float*) {
  return 0;
}
#endif

template <Dtype kDtype>
void pack_k(const TileShape& shape, const TileRows& k, std::int64_t keys, std::size_t panel_width, float* panels) {
  // Columns after the last key are zero: they are multiplied, and then masked.
  static constexpr std::byte kZeroRow[kMaxHeadDim * sizeof(float)] = {};
  const auto dims = static_cast<std::size_t>(shape.head_dim);
  const auto width = static_cast<std::int64_t>(panel_width);
  const std::int64_t columns = (keys + width - 1) / width * width;
  for (std::int64_t key = 0; key < columns; key += kPackedKeys) {
    const std::byte* rows[kPackedKeys];
    for (std::int64_t i = 0; i < kPackedKeys; ++i) rows[i] = key + i < keys ? k.at(key + i) : kZeroRow;
    float* panel = panels + static_cast<std::size_t>(key / width) * dims * panel_width + key % width;
    const std::size_t whole = transpose_squares<kDtype>(rows, dims, panel_width, panel);
    if (whole == dims) continue;
    for (std::int64_t i = 0; i < kPackedKeys; ++i) rows[i] += whole * size_of(kDtype);
    for (std::int64_t i = 0; i < kPackedKeys; i += kKeysAtOnce) {
      transpose<kDtype>(rows + i, dims - whole, panel_width, panel + whole * panel_width + i);
    }
  }
}

// Returns whether every value is finite.
template <Dtype kDtype>
bool pack_v(const TileShape& shape, const TileRows& v, std::int64_t keys, std::size_t panel_width, float* panels) {
  const auto dims = static_cast<std::size_t>(shape.head_dim_v);
  const hn::ScalableTag<float> d;
  const AtMostEight d8;
  constexpr std::size_t kVector = hn::MaxLanes(d);
  auto taint = hn::Zero(d);  // 0 · x is NaN for NaN and ∞
  auto taint8 = hn::Zero(d8);
  for (std::int64_t key = 0; key < keys; ++key) {
    const std::byte* source = v.at(key);
    float* target = panels + static_cast<std::size_t>(key) * panel_width;
    for (std::size_t begin = 0; begin < dims; begin += panel_width, target += kKeyTile * panel_width) {
      const std::size_t width = std::min(panel_width, dims - begin);
      std::size_t c = 0;
      for (; c + kVector <= width; c += kVector) {
        const auto value = load_wide<kDtype>(d, source, begin + c);
        taint = hn::MulAdd(value, hn::Zero(d), taint);
        hn::Store(value, d, target + c);
      }
      for (; c < width; c += hn::Lanes(d8)) {
        const auto value = load_wide<kDtype>(d8, source, begin + c);
        taint8 = hn::MulAdd(value, hn::Zero(d8), taint8);
        hn::Store(value, d8, target + c);
      }
      // Pads to a whole vector, because the last vector is multiplied whole.
      for (; c % kVector != 0; c += hn::Lanes(d8)) hn::Store(hn::Zero(d8), d8, target + c);
    }
  }
  return hn::AllTrue(d, hn::Eq(taint, hn::Zero(d))) && hn::AllTrue(d8, hn::Eq(taint8, hn::Zero(d8)));
}

template <Dtype kDtype>
void widen_row(const void* source, std::size_t count, float* target) {
  const AtMostEight d;
  for (std::size_t c = 0; c < count; c += hn::Lanes(d)) {
    hn::StoreU(load_wide<kDtype>(d, static_cast<const std::byte*>(source), c), d, target + c);
  }
}

inline void widen(const void* source, Dtype dtype, int count, float* target) {
  const auto n = static_cast<std::size_t>(count);
  switch (dtype) {
    case Dtype::kF32:
      return widen_row<Dtype::kF32>(source, n, target);
    case Dtype::kBf16:
      return widen_row<Dtype::kBf16>(source, n, target);
    case Dtype::kF16:
      return widen_row<Dtype::kF16>(source, n, target);
  }
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
