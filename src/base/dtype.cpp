// SPDX-License-Identifier: Apache-2.0
#include "base/dtype.hpp"

#include <cstring>

namespace ringattn {

std::string_view dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return "fp32";
    case Dtype::kBf16:
      return "bf16";
    case Dtype::kF16:
      return "fp16";
  }
  return "fp32";
}

std::optional<Dtype> parse_dtype(std::string_view name) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  return std::nullopt;
}

float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16;
  const std::uint32_t magnitude = bits & 0x7fffU;
  if (magnitude >= 0x7c00U) {  // infinity, NaN
    return std::bit_cast<float>(sign | 0x7f800000U | ((magnitude & 0x3ffU) << 13));
  }
  if (magnitude < 0x400U) {  // subnormal: an exact multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000U));
}

std::uint16_t float_to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU));
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // rounds to at least 2^16
  if (magnitude < 0x38800000U) {
    // Below 2^-14: adding 0.5 leaves a multiple of 2^-24 in the low bits, rounded to nearest even by the FPU.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
  }
  const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

float load_element(const void* address, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    float value;
    std::memcpy(&value, address, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, address, sizeof bits);
  return dtype == Dtype::kBf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

void store_element(void* address, Dtype dtype, float value) {
  if (dtype == Dtype::kF32) {
    std::memcpy(address, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = dtype == Dtype::kBf16 ? float_to_bf16(value) : float_to_f16(value);
  std::memcpy(address, &bits, sizeof bits);
}

}  // namespace ringattn
