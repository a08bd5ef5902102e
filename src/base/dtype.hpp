// SPDX-License-Identifier: Apache-2.0
// Element types of q, k, v and out, and their exact conversions.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace ringattn {

enum class Dtype : std::uint8_t { kF32, kBf16, kF16 };

constexpr std::size_t size_of(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

// "fp32", "bf16", "fp16".
std::string_view dtype_name(Dtype dtype);
std::optional<Dtype> parse_dtype(std::string_view name);

// bf16 and fp16 values are passed as their bit patterns.
inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// Round to nearest even; NaN stays NaN (quiet).
inline std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

float f16_to_float(std::uint16_t bits);
// Round to nearest even; overflow gives infinity, NaN stays NaN (quiet).
std::uint16_t float_to_f16(float value);

// The mask of the exponent bits of a 16-bit float. All of them are set exactly for infinities and NaN.
constexpr unsigned exponent_bits(Dtype dtype) { return dtype == Dtype::kBf16 ? 0x7f80U : 0x7c00U; }

// One element of `dtype` at `address` as float (exact), and back (round to nearest even).
float load_element(const void* address, Dtype dtype);
void store_element(void* address, Dtype dtype, float value);

}  // namespace ringattn
