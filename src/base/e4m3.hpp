// SPDX-License-Identifier: Apache-2.0
// FP8 E4M3 (OCP, "fn"): one sign bit, four exponent bits with bias 7, three mantissa bits. The largest value is 448,
// the smallest positive one 2⁻⁹. 0x7f and 0xff are NaN, and there are no infinities. Host and device share these
// definitions.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"

namespace ringattn {

inline constexpr float kMaxE4m3 = 448.0F;

// Exact.
RINGATTN_HOST_DEVICE inline float e4m3_to_float(std::uint8_t bits) {
  const std::uint32_t sign = (bits & 0x80U) << 24;
  const std::uint32_t magnitude = bits & 0x7fU;
  if (magnitude == 0x7fU) return __builtin_bit_cast(float, sign | 0x7fc00000U);
  if (magnitude < 8U) {  // zero and subnormals: multiples of 2⁻⁹
    const float value = static_cast<float>(magnitude) * 0x1p-9F;
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(std::uint32_t, value));
  }
  return __builtin_bit_cast(float, sign | ((magnitude << 20) + (120U << 23)));  // biases: 127 − 7
}

// Rounds to nearest even. Values beyond ±448, infinities included, saturate to ±448, and every NaN becomes 0x7f. This
// matches the instruction cvt.rn.satfinite.e4m3x2.f32.
RINGATTN_HOST_DEVICE inline std::uint8_t float_to_e4m3(float value) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  if (magnitude > 0x7f800000U) return 0x7fU;
  if (magnitude >= 0x43e00000U) return static_cast<std::uint8_t>(sign | 0x7eU);  // 448
  if (magnitude < 0x3c800000U) {  // below 2⁻⁶ the spacing is 2⁻⁹, as fp32's is from 2¹⁴ on: the addition rounds
    const float shifted = __builtin_bit_cast(float, magnitude) + 0x1p14F;
    return static_cast<std::uint8_t>(sign | (__builtin_bit_cast(std::uint32_t, shifted) - 0x46800000U));
  }
  const std::uint32_t nearest = magnitude + 0x7ffffU + ((magnitude >> 20) & 1U);
  return static_cast<std::uint8_t>(sign | ((nearest - (120U << 23)) >> 20));
}

}  // namespace ringattn
