// SPDX-License-Identifier: Apache-2.0
#include "base/dtype.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

namespace ringattn {
namespace {

// Every 16-bit pattern survives the way to float and back; NaN stays NaN.
TEST(Dtype, SixteenBitPatternsRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float from_f16 = f16_to_float(half);
    if (std::isnan(from_f16)) {
      EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(from_f16))));
    } else {
      ASSERT_EQ(float_to_f16(from_f16), half) << bits;
    }
    const float from_bf16 = bf16_to_float(half);
    if (std::isnan(from_bf16)) {
      EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(from_bf16))));
    } else {
      ASSERT_EQ(float_to_bf16(from_bf16), half) << bits;
    }
  }
}

// Between two neighbours the nearer wins, and of two equally near the even one.
TEST(Dtype, RoundsToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7c00U - 1; ++bits) {
    const float low = f16_to_float(static_cast<std::uint16_t>(bits));
    const float high = f16_to_float(static_cast<std::uint16_t>(bits + 1));
    const float middle = low + (high - low) / 2;  // exact: 12 significant bits
    const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(float_to_f16(middle), even) << bits;
    ASSERT_EQ(float_to_f16(std::nextafter(middle, 0.0F)), bits);
    ASSERT_EQ(float_to_f16(std::nextafter(middle, 1e9F)), bits + 1);
  }
  EXPECT_EQ(float_to_bf16(1.00390625F), 0x3f80);  // halfway, even below
  EXPECT_EQ(float_to_bf16(1.01171875F), 0x3f82);  // halfway, even above
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(float_to_f16(65519.0F), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.0F), 0x7c00);
  EXPECT_EQ(float_to_f16(-1e30F), 0xfc00);
}

TEST(Dtype, NamesParse) {
  for (const auto& [name, dtype] :
       {std::pair{"fp32", Dtype::kF32}, std::pair{"bf16", Dtype::kBf16}, std::pair{"fp16", Dtype::kF16}}) {
    EXPECT_EQ(dtype_name(dtype), name);
    EXPECT_EQ(parse_dtype(name), dtype);
  }
  EXPECT_FALSE(parse_dtype("float"));
}

}  // namespace
}  // namespace ringattn
