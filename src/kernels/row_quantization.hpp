// SPDX-License-Identifier: Apache-2.0
// The arithmetic of compressed rows: from elements to codes and back, one definition for the host and for devices. All
// of it is single additions, multiplications and divisions of fp32, each rounded to nearest even as IEEE 754 says, and
// moves of bits: processors and GPUs agree on these, so codes and elements have the same bits on both. It asks for a
// build without contraction and without flushing of subnormals, as all targets of the house are built.
//
// Elements are bf16 or fp16, widened to fp32, which is exact. What a decompression gives is an fp32 number that the
// caller rounds once to the tensor's dtype, to nearest even.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/e4m3.hpp"
#include "base/host_device.hpp"

namespace ringattn {

// ---- 8 bits -----------------------------------------------------------------------------------------------------
// element = code · scale, with a scale in fp32 that is finite and above 0.

inline constexpr float kMaxInt8 = 127.0F;  // −128 is no code

// The scale of elements whose greatest magnitude is `greatest`, `limit` being the greatest code. 1 where all are 0. The
// least bf16 above 0 is 2⁻¹³³, and a 448th of it is still above 0.
RINGATTN_HOST_DEVICE inline float scale_of(float greatest, float limit) {
  return greatest > 0.0F ? greatest / limit : 1.0F;
}

// That of a row of its own: the least bf16 that is not below it. Its product with a code has 15 bits at most, so fp32
// holds it, and an element is rounded once: kernels may multiply in the elements' dtype. Where the greatest code would
// then lie beyond `most`, the dtype's greatest number, it is the quotient itself. ∞ or NaN where `greatest` is.
RINGATTN_HOST_DEVICE inline float row_scale_of(float greatest, float limit, float most) {
  if (!(greatest > 0.0F)) return greatest == 0.0F ? 1.0F : __builtin_bit_cast(float, 0x7fc00000U);
  const float quotient = greatest / limit;
  const std::uint32_t above = (__builtin_bit_cast(std::uint32_t, quotient) + 0xffffU) & 0xffff0000U;
  return limit * __builtin_bit_cast(float, above) <= most ? __builtin_bit_cast(float, above) : quotient;
}

// To nearest, ties to even, for magnitudes below 2²².
RINGATTN_HOST_DEVICE inline float to_nearest_integer(float value) {
  const float shifted = value + 0x1.8p23F;
  return shifted - 0x1.8p23F;
}

// Beyond ±448 it saturates: scales that were measured on other rows may be too small.
RINGATTN_HOST_DEVICE inline std::uint8_t quantize_to_fp8(float element, float scale) {
  return float_to_e4m3(element / scale);
}

RINGATTN_HOST_DEVICE inline std::int8_t quantize_to_int8(float element, float scale) {
  const float ratio = element / scale;
  // NaN becomes −127, of a scale that is NaN or ∞ itself.
  const float limited = ratio > kMaxInt8 ? kMaxInt8 : (ratio >= -kMaxInt8 ? ratio : -kMaxInt8);
  return static_cast<std::int8_t>(to_nearest_integer(limited));
}
RINGATTN_HOST_DEVICE inline float dequantize_int8(std::int8_t code, float scale) {
  return static_cast<float>(code) * scale;
}

// What many elements are divided by. quotient() is the rounded quotient in four operations instead of a division's
// dozen, where `quick` says so: the reciprocal, rounded, and what its rounding has left out give a quotient that is one
// of the two nearest numbers, and a step with its remainder, which is exact, gives the nearer one.
struct Divisor {
  float scale = 1.0F;
  float reciprocal = 1.0F;
  float rest = 0.0F;   // of the reciprocal
  bool quick = false;  // nothing on the way is so small that it loses digits, unless the quotient is far below 2⁻¹⁰

  static constexpr float kMax = 512.0F;

  // Of a number that is not negative. Quotients above kMax are something above it, or kMax.
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
// element = code · scale + zero, with codes 0 … 15 and one (scale, zero) for a group of elements, both of the tensor's
// dtype. The zero is the group's least element, and so exact. The scale is a fifteenth of the group's range, rounded
// *towards zero* to the dtype: so no code lies above the greatest element, and nothing that was finite comes back as ∞.
// The greatest elements are then up to 15 units in the scale's last place (bf16: 0.12 steps) farther than the last
// code.

inline constexpr float kMaxInt4 = 15.0F;

// The nearest bf16 and fp16 that are not above `value`, which is finite and not negative, as fp32. Below 2⁻¹⁴ fp16 has
// steps of 2⁻²⁴.
RINGATTN_HOST_DEVICE inline float truncated_to_bf16(float value) {
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, value) & 0xffff0000U);
}
RINGATTN_HOST_DEVICE inline float truncated_to_f16(float value) {
  if (value < 0x1p-14F) return static_cast<float>(static_cast<std::uint32_t>(value * 0x1p24F)) * 0x1p-24F;
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, value) & 0xffffe000U);
}

// The zero of a group whose least element is `least`. −0 becomes 0, so that it doesn't matter which of both was met.
RINGATTN_HOST_DEVICE inline float int4_zero_point(float least) { return least + 0.0F; }

// A fifteenth of the range of a group, before it is truncated to the dtype. Halves can't overflow, and halving bf16 or
// fp16 is exact in fp32.
RINGATTN_HOST_DEVICE inline float int4_scale(float least, float greatest) {
  const float range = 0.5F * greatest - 0.5F * least;
  return range > 0.0F ? range / (0.5F * kMaxInt4) : 0.0F;
}

// A group whose range is below 15 steps of the dtype's subnormals has the scale 0 and the codes 0.
RINGATTN_HOST_DEVICE inline std::uint8_t quantize_to_int4(float element, float scale, float zero) {
  if (!(scale > 0.0F)) return 0;
  const float ratio = (0.5F * element - 0.5F * zero) / (0.5F * scale);
  const float limited = ratio > kMaxInt4 ? kMaxInt4 : (ratio < 0.0F ? 0.0F : ratio);
  return static_cast<std::uint8_t>(to_nearest_integer(limited));
}

// The product has at most 15 significant bits and is exact, so this is fma(code, scale, zero) as well, which a kernel
// may use instead: with the halves nothing overflows on the way, whose result does not.
RINGATTN_HOST_DEVICE inline float dequantize_int4(std::uint8_t code, float scale, float zero) {
  return 2.0F * (static_cast<float>(code) * (0.5F * scale) + 0.5F * zero);
}

// Whether code · scale + zero, rounded once to the dtype, may differ from dequantize_int4(), which has rounded to fp32
// before: fp32 holds the sum unless the two lie far apart. Where the zero is the greater one, then what fp32 loses is
// far below half of the sum's last place in bf16; in fp16, which has more places, the sum may lie beside a tie. `zero`
// is the magnitude. Without branches, as kernels ask for many.
RINGATTN_HOST_DEVICE inline bool int4_rounds_twice_to_bf16(float scale, float zero) {
  return (zero > 0.0F) & (zero < scale * 0x1p-10F);
}
RINGATTN_HOST_DEVICE inline bool int4_rounds_twice_to_f16(float scale, float zero) {
  return (scale > 0.0F) & (zero > 0.0F) & ((zero < scale * 0x1p-7F) | (zero > scale * 0x1p11F));
}

// Byte i of a row holds channel 2i in its low and channel 2i + 1 in its high four bits.
RINGATTN_HOST_DEVICE inline std::uint8_t int4_pair(std::uint8_t even, std::uint8_t odd) {
  return static_cast<std::uint8_t>(even | (odd << 4));
}
RINGATTN_HOST_DEVICE inline std::uint8_t int4_of_pair(std::uint8_t pair, std::int64_t channel) {
  return channel % 2 == 0 ? static_cast<std::uint8_t>(pair & 0xfU) : static_cast<std::uint8_t>(pair >> 4);
}

// Keys have a (scale, zero) for each channel and each group of `group` tokens of a sequence. They lie in the rows of
// the group's tokens, as many of each: token t of a group has those of channels [t · dim / group, (t + 1) · dim /
// group). So a row has the same bytes as every other, and pages, blocks and ranks cut groups anywhere.
struct ScaleOffset {
  std::int64_t token = 0;  // of the group
  std::int64_t pair = 0;   // of that token's row
};
RINGATTN_HOST_DEVICE inline ScaleOffset scale_offset_of(std::int64_t channel, std::int64_t dim, std::int64_t group) {
  const std::int64_t of_token = dim / group;
  return {channel / of_token, channel % of_token};
}

// Tokens of a sequence of `keys` keys whose groups are full and have codes. The rest, fewer than a group, are elements.
RINGATTN_HOST_DEVICE inline std::int64_t full_group_tokens(std::int64_t keys, std::int64_t group) {
  return keys / group * group;
}

// The remainder of a hybrid row is element − product in fp32, and 0 in the outlier channels. Its least number is no
// element: the zero is the nearest of the dtype, and the scale that of the range from there. What comes back is limited
// to the dtype's greatest numbers, for a remainder's rounding may lead beyond.
RINGATTN_HOST_DEVICE inline float hybrid_element(float product, float remainder, float greatest_of_dtype) {
  const float sum = product + remainder;
  return sum > greatest_of_dtype ? greatest_of_dtype : (sum < -greatest_of_dtype ? -greatest_of_dtype : sum);
}

// ---- Codebooks --------------------------------------------------------------------------------------------------
// A run of `width` channels is one of 256 vectors of a codebook: the nearest, and of several the first.

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
