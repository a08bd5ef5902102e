// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/quant/row_codec_ops.hpp"

#include <cstring>

// The same SIMD targets as in quant_ops.cpp.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quant/row_codec_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway wants it.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ringattn::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Calls each(d, first element) for vectors of a row: whole ones, then of at most 8 lanes, then of one lane.
template <class Each>
HWY_INLINE void for_each_vector(std::int64_t count, const Each& each) {
  const hn::ScalableTag<float> whole;
  const hn::CappedTag<float, 8> part;
  constexpr auto kWhole = static_cast<std::int64_t>(hn::MaxLanes(hn::ScalableTag<float>()));
  constexpr auto kPart = static_cast<std::int64_t>(hn::MaxLanes(hn::CappedTag<float, 8>()));
  std::int64_t i = 0;
  for (; i + kWhole <= count; i += kWhole) each(whole, i);
  for (; i + kPart <= count; i += kPart) each(part, i);
  for (; i < count; ++i) each(hn::CappedTag<float, 1>(), i);
}

// Bytes from `at` on, one for each lane.
template <class T, class D>
HWY_INLINE auto load_bytes(D, const std::byte* at) {
  const hn::Rebind<T, D> d8;
  return hn::LoadU(d8, reinterpret_cast<const T*>(at));
}

void dequantize_fp8_row(const std::byte* values, float scale, std::int64_t count, float* wide) {
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    const hn::Rebind<std::uint32_t, decltype(d)> d32;
    const auto bits = hn::PromoteTo(d32, load_bytes<std::uint8_t>(d, values + i));
    const auto magnitude = hn::And(bits, hn::Set(d32, 0x7fU));
    const auto sign = hn::ShiftLeft<24>(hn::Xor(bits, magnitude));
    // Fields are moved into place and the exponent gets its bias of fp32. Subnormals are multiples of 2⁻⁹. (A product
    // of the moved fields and 2¹²⁰ is exact for all, but subnormal operands take a hundred cycles on some processors.)
    const auto normal = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(d32, 120U << 23));
    const hn::Rebind<std::int32_t, decltype(d)> ds32;
    const auto subnormal = hn::Mul(hn::ConvertTo(d, hn::BitCast(ds32, magnitude)), hn::Set(d, 0x1p-9F));
    const auto number = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 8U)), hn::BitCast(d32, subnormal), normal);
    const auto is_nan = hn::Eq(magnitude, hn::Set(d32, 0x7fU));
    const auto value = hn::Or(sign, hn::IfThenElse(is_nan, hn::Set(d32, 0x7fc00000U), number));
    hn::StoreU(hn::Mul(hn::BitCast(d, value), hn::Set(d, scale)), d, wide + i);
  });
}

void dequantize_int8_row(const std::byte* values, float scale, std::int64_t count, float* wide) {
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    const hn::Rebind<std::int32_t, decltype(d)> d32;
    const auto value = hn::ConvertTo(d, hn::PromoteTo(d32, load_bytes<std::int8_t>(d, values + i)));
    hn::StoreU(hn::Mul(value, hn::Set(d, scale)), d, wide + i);
  });
}

// Values i, i + 1, … of a row of pairs, one for each lane.
template <class D>
HWY_INLINE hn::Vec<D> load_int4(D d, const std::byte* pairs, std::int64_t i) {
  const hn::Rebind<std::int32_t, D> d32;
  const hn::Rebind<std::uint32_t, D> du32;
  static_assert(hn::MaxLanes(du32) <= 16);
  constexpr std::uint32_t kPerWord = 8;
  const auto word_at = [&](std::int64_t word) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, pairs + 4 * word, sizeof bits);
    return bits;
  };
  const auto lane = hn::Iota(du32, 0);
  const auto shifts = hn::ShiftLeft<2>(hn::And(lane, hn::Set(du32, 7U)));
  auto words = hn::Set(du32, word_at(i / kPerWord) >> (4 * (i % kPerWord)));
  if constexpr (hn::MaxLanes(du32) > kPerWord) {
    words = hn::IfThenElse(hn::Lt(lane, hn::Set(du32, kPerWord)), words, hn::Set(du32, word_at(i / kPerWord + 1)));
  }
  return hn::ConvertTo(d, hn::BitCast(d32, hn::And(hn::Shr(words, shifts), hn::Set(du32, 15U))));
}

template <class D>
HWY_INLINE void store_int4(D d, hn::Vec<D> value, hn::Vec<D> scale, hn::Vec<D> zero, float* to) {
  const auto half = hn::Set(d, 0.5F);
  const auto sum = hn::Add(hn::Mul(value, hn::Mul(half, scale)), hn::Mul(half, zero));
  hn::StoreU(hn::Mul(hn::Set(d, 2.0F), sum), d, to);
}

void dequantize_int4_row(const std::byte* pairs, const float* scales, const float* zeros, std::int64_t count,
                         float* wide) {
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    store_int4(d, load_int4(d, pairs, i), hn::LoadU(d, scales + i), hn::LoadU(d, zeros + i), wide + i);
  });
}

void dequantize_int4_run(const std::byte* pairs, float scale, float zero, std::int64_t count, float* wide) {
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    store_int4(d, load_int4(d, pairs, i), hn::Set(d, scale), hn::Set(d, zero), wide + i);
  });
}

void narrow_row_to_bf16(const float* wide, std::int64_t count, std::byte* row) {
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    const hn::Rebind<std::uint32_t, decltype(d)> d32;
    const hn::Rebind<std::int32_t, decltype(d)> ds32;
    const hn::Rebind<std::uint16_t, decltype(d)> d16;
    const auto value = hn::LoadU(d, wide + i);
    const auto bits = hn::BitCast(d32, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1U));
    const auto nearest = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffU))));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d32, 0x40U));
    const auto rounded = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(value)), quiet, nearest);
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(ds32, rounded)), d16, reinterpret_cast<std::uint16_t*>(row) + i);
  });
}

const RowCodecOps& row_codec_ops() {
  static const RowCodecOps ops{&dequantize_fp8_row, &dequantize_int8_row, &dequantize_int4_row, &dequantize_int4_run,
                               &narrow_row_to_bf16};
  return ops;
}

}  // namespace ringattn::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn {

HWY_EXPORT(row_codec_ops);

const RowCodecOps& best_row_codec_ops() { return HWY_DYNAMIC_DISPATCH(row_codec_ops)(); }

}  // namespace ringattn
#endif  // HWY_ONCE
