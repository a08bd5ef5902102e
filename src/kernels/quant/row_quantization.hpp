// SPDX-License-Identifier: Apache-2.0
// Quantization arithmetic, one definition for hosts and devices. All of it is single fp32 additions, multiplications
// and divisions, each rounded to nearest even as in IEEE 754, and bit moves. So results are bitwise equal on processors
// and GPUs. It requires a build without contraction and without flushing of subnormals, as all targets of this project
// are built.
//
// Elements are bf16 or fp16, widened to fp32, which is exact. Dequantization gives an fp32 number that the caller
// rounds once to the tensor's dtype, to nearest even.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/e4m3.hpp"
#include "base/host_device.hpp"

namespace ringattn {

// ---- 8 bits -----------------------------------------------------------------------------------------------------
// element = value · scale, with a finite fp32 scale above 0.

inline constexpr float kMaxInt8 = 127.0F;  // −128 is not used

// The scale for elements whose absolute max is `absmax`, where `limit` is the largest quantized value. 1 if all
// elements are 0. The smallest positive bf16 is 2⁻¹³³, and 1/448 of it is still above 0.
RINGATTN_HOST_DEVICE inline float scale_of(float absmax, float limit) { return absmax > 0.0F ? absmax / limit : 1.0F; }

// The scale of a single row: scale_of() rounded up to bf16. Its product with an 8-bit value has at most 15 significant
// bits, so it is exact in fp32 and an element is rounded once: kernels may multiply in the elements' dtype. If the
// largest value would then exceed `dtype_max`, the scale is not rounded up. ∞ or NaN if `absmax` is.
RINGATTN_HOST_DEVICE inline float row_scale_of(float absmax, float limit, float dtype_max) {
  if (!(absmax > 0.0F)) return absmax == 0.0F ? 1.0F : __builtin_bit_cast(float, 0x7fc00000U);
  const float quotient = absmax / limit;
  const std::uint32_t above = (__builtin_bit_cast(std::uint32_t, quotient) + 0xffffU) & 0xffff0000U;
  return limit * __builtin_bit_cast(float, above) <= dtype_max ? __builtin_bit_cast(float, above) : quotient;
}

// Rounds to nearest, ties to even. Requires a magnitude below 2²².
RINGATTN_HOST_DEVICE inline float to_nearest_integer(float value) {
  const float shifted = value + 0x1.8p23F;
  return shifted - 0x1.8p23F;
}

// Saturates beyond ±448: scales measured on other rows may be too small.
RINGATTN_HOST_DEVICE inline std::uint8_t quantize_to_fp8(float element, float scale) {
  return float_to_e4m3(element / scale);
}

RINGATTN_HOST_DEVICE inline std::int8_t quantize_to_int8(float element, float scale) {
  const float ratio = element / scale;
  // NaN becomes −127; the scale is then NaN or ∞ itself.
  const float limited = ratio > kMaxInt8 ? kMaxInt8 : (ratio >= -kMaxInt8 ? ratio : -kMaxInt8);
  return static_cast<std::int8_t>(to_nearest_integer(limited));
}
RINGATTN_HOST_DEVICE inline float dequantize_int8(std::int8_t value, float scale) {
  return static_cast<float>(value) * scale;
}

// A divisor of many elements. quotient() is the correctly rounded quotient in four operations instead of a division's
// dozen, if `quick`. The rounded reciprocal and its rounding error give one of the two nearest numbers, and a
// correction with the exact remainder gives the nearer one.
struct Divisor {
  float scale = 1.0F;
  float reciprocal = 1.0F;
  float rest = 0.0F;   // rounding error of the reciprocal
  bool quick = false;  // no intermediate result loses digits to underflow, unless the quotient is far below 2⁻¹⁰

  static constexpr float kMax = 512.0F;

  // Requires a nonnegative argument. Quotients above kMax give kMax or some number above it.
  RINGATTN_HOST_DEVICE float quotient(float magnitude) const {
    const float near = fminf(fmaf(magnitude, reciprocal, magnitude * rest), kMax);
    return fmaf(fmaf(-near, scale, magnitude), reciprocal, near);
  }
};
RINGATTN_HOST_DEVICE inline Divisor divisor_of(float scale) {
  const float reciprocal = 1.0F / scale;
  return {scale, reciprocal, fmaf(-scale, reciprocal, 1.0F) * reciprocal, scale >= 0x1p-60F && scale <= 0x1p60F};
}

// ---- 4 bits -----------------------------------------------------------------------------------------------------
// element = value · scale + zero, with values 0 … 15 and one (scale, zero point) per group of elements, both of the
// tensor's dtype. The zero point is the group's minimum, and so is exact. The scale is a fifteenth of the group's
// range, rounded *towards zero* to the dtype. So no value is above the group's maximum, and no finite element becomes
// ∞. The largest elements are then up to 15 units in the scale's last place (bf16: 0.12 steps) above the largest value.

inline constexpr float kMaxInt4 = 15.0F;

// Round a finite, nonnegative `value` down to bf16 or fp16, as fp32. Below 2⁻¹⁴ fp16 has steps of 2⁻²⁴.
RINGATTN_HOST_DEVICE inline float truncated_to_bf16(float value) {
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, value) & 0xffff0000U);
}
RINGATTN_HOST_DEVICE inline float truncated_to_f16(float value) {
  if (value < 0x1p-14F) return static_cast<float>(static_cast<std::uint32_t>(value * 0x1p24F)) * 0x1p-24F;
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, value) & 0xffffe000U);
}

// The zero point of a group whose minimum is `minimum`. −0 becomes 0, so that it does not matter which of them is found
// first.
RINGATTN_HOST_DEVICE inline float int4_zero_point(float minimum) { return minimum + 0.0F; }

// A fifteenth of a group's range, before truncation to the dtype. Halves avoid overflow, and halving bf16 or fp16 is
// exact in fp32.
RINGATTN_HOST_DEVICE inline float int4_scale(float minimum, float maximum) {
  const float range = 0.5F * maximum - 0.5F * minimum;
  return range > 0.0F ? range / (0.5F * kMaxInt4) : 0.0F;
}

// A group whose range is below 15 subnormal steps of the dtype has scale 0 and values 0.
RINGATTN_HOST_DEVICE inline std::uint8_t quantize_to_int4(float element, float scale, float zero) {
  if (!(scale > 0.0F)) return 0;
  const float ratio = (0.5F * element - 0.5F * zero) / (0.5F * scale);
  const float limited = ratio > kMaxInt4 ? kMaxInt4 : (ratio < 0.0F ? 0.0F : ratio);
  return static_cast<std::uint8_t>(to_nearest_integer(limited));
}

// The product has at most 15 significant bits and is exact, so this equals fma(value, scale, zero), which a kernel may
// use instead. Halves keep a finite result from overflowing on the way.
RINGATTN_HOST_DEVICE inline float dequantize_int4(std::uint8_t value, float scale, float zero) {
  return 2.0F * (static_cast<float>(value) * (0.5F * scale) + 0.5F * zero);
}

// Whether value · scale + zero, rounded once to the dtype, may differ from dequantize_int4(), which first rounds to
// fp32. fp32 holds the sum exactly unless the two terms differ widely in magnitude. If the zero point is larger, fp32
// loses far less than half a unit in the sum's last place in bf16. fp16 has more bits, so the sum may lie next to a
// tie. `zero` is a magnitude. Branch-free, because kernels evaluate it often.
RINGATTN_HOST_DEVICE inline bool int4_rounds_twice_to_bf16(float scale, float zero) {
  return (zero > 0.0F) & (zero < scale * 0x1p-10F);
}
RINGATTN_HOST_DEVICE inline bool int4_rounds_twice_to_f16(float scale, float zero) {
  return (scale > 0.0F) & (zero > 0.0F) & ((zero < scale * 0x1p-7F) | (zero > scale * 0x1p11F));
}

// Byte i of a row holds channel 2i in its low four bits and channel 2i + 1 in its high four bits.
RINGATTN_HOST_DEVICE inline std::uint8_t int4_pair(std::uint8_t even, std::uint8_t odd) {
  return static_cast<std::uint8_t>(even | (odd << 4));
}

// int4_channel stores a (scale, zero point) for each channel and each group of `group` tokens of a sequence. They are
// distributed evenly over the rows of the group's tokens: token t of a group has those of channels [t · dim / group, (t
// + 1) · dim / group). So all rows have the same size, and pages, blocks and ranks may divide groups anywhere.
struct ScaleOffset {
  std::int64_t token = 0;  // token in the group
  std::int64_t pair = 0;   // pair in that token's row
};
RINGATTN_HOST_DEVICE inline ScaleOffset scale_offset_of(std::int64_t channel, std::int64_t dim, std::int64_t group) {
  const std::int64_t of_token = dim / group;
  return {channel / of_token, channel % of_token};
}

// Tokens of a sequence of `keys` keys in full groups, which are quantized. The remaining tokens, fewer than a group,
// are stored as elements.
RINGATTN_HOST_DEVICE inline std::int64_t full_group_tokens(std::int64_t keys, std::int64_t group) {
  return keys / group * group;
}

// An element of a hybrid row: product + remainder, limited to the dtype's finite range, which a remainder's rounding
// may exceed. The remainder is element − product in fp32, and 0 in the outlier channels. Its minimum is not an element
// of the dtype: the zero point is the nearest one, and the scale is that of the range from there.
RINGATTN_HOST_DEVICE inline float hybrid_element(float product, float remainder, float dtype_max) {
  const float sum = product + remainder;
  return sum > dtype_max ? dtype_max : (sum < -dtype_max ? -dtype_max : sum);
}

// ---- Codebooks --------------------------------------------------------------------------------------------------
// A run of `width` channels is stored as the index of the nearest of 256 codebook vectors. Ties go to the lower index.

inline constexpr int kCodebookVectors = 256;

// Ascending channels, one chain of sums.
RINGATTN_HOST_DEVICE inline float squared_distance(const float* element, const float* vector, int width) {
  float sum = 0.0F;
  for (int i = 0; i < width; ++i) {
    const float difference = element[i] - vector[i];
    sum = sum + difference * difference;
  }
  return sum;
}

}  // namespace ringattn
