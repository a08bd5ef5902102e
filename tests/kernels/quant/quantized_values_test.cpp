// SPDX-License-Identifier: Apache-2.0
// The arithmetic of compressed rows against its definition in fp64, at the edges of the dtypes too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/dtype.hpp"
#include "base/e4m3.hpp"
#include "kernels/quant/quant_ops.hpp"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn::testing {
namespace {

constexpr float kGreatestBf16 = 0x1.fep127F;
constexpr float kGreatestF16 = 65504.0F;
constexpr float kMinBf16 = 0x1p-133F;
constexpr float kMinF16 = 0x1p-24F;

float rounded(float value, Dtype dtype) {
  return dtype == Dtype::kBf16 ? bf16_to_float(float_to_bf16(value)) : f16_to_float(float_to_f16(value));
}
float truncated(float value, Dtype dtype) {
  return dtype == Dtype::kBf16 ? truncated_to_bf16(value) : truncated_to_f16(value);
}

TEST(QuantizedValues, IntegersAreTheNearest) {
  for (int i = -1270; i <= 1270; ++i) {
    const float value = static_cast<float>(i) / 10.0F;
    EXPECT_EQ(to_nearest_integer(value), std::nearbyint(value)) << value;
    EXPECT_EQ(quantize_to_int8(value, 1.0F), static_cast<int>(std::nearbyint(value))) << value;
  }
  EXPECT_EQ(to_nearest_integer(2.5F), 2.0F);
  EXPECT_EQ(to_nearest_integer(3.5F), 4.0F);
  EXPECT_EQ(quantize_to_int8(1e9F, 1.0F), 127);
  EXPECT_EQ(quantize_to_int8(-1e9F, 1.0F), -127);
}

// What kernels code with instead of divisions: the same quotient, wherever a code of any format depends on its bits.
TEST(QuantizedValues, QuotientsAreThoseOfDivisions) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<float> exponent(-60.0F, 60.0F), ratio(-14.0F, 9.0F);
  for (int i = 0; i < 400'000; ++i) {
    const Dtype dtype = i % 2 == 0 ? Dtype::kBf16 : Dtype::kF16;
    // fp16's elements end at 2^16, so their scales lie below.
    const float scale = std::exp2(dtype == Dtype::kBf16 ? exponent(random) : exponent(random) / 12.0F);
    const Divisor divisor = divisor_of(scale);
    if (scale < 0x1p-60F || scale > 0x1p60F) continue;
    ASSERT_TRUE(divisor.quick) << scale;
    const float element = rounded(std::exp2(ratio(random)) * scale, dtype);
    const float expected = element / scale;
    if (expected > Divisor::kMax) continue;
    const float got = divisor.quotient(element);
    ASSERT_TRUE(got == expected || (got < 0x1p-11F && expected < 0x1p-11F)) << element << " / " << scale;
  }
  // Quotients next to the numbers halfway between two quantized values, where one bit decides.
  for (int i = 0; i < 400'000; ++i) {
    const float element = rounded(std::exp2(ratio(random)) * 3.0F, Dtype::kF16);
    const float halfway = static_cast<float>(2 * (i % 24) + 1) / 2.0F;
    const float scale = std::nextafter(element / halfway, i % 2 == 0 ? 0.0F : 1e9F);
    ASSERT_EQ(divisor_of(scale).quotient(element), element / scale) << element << " / " << scale;
  }
  for (const float scale : {0.0F, 0x1p-61F, 0x1p-140F, 0x1p61F, std::numeric_limits<float>::infinity()}) {
    EXPECT_FALSE(divisor_of(scale).quick) << scale;
  }
  // What lies beyond all quantized values stays there.
  for (const float element : {kGreatestBf16, 1e30F, std::numeric_limits<float>::infinity()}) {
    for (const float scale : {0x1p-60F, 0.003F, 0x1p60F}) {
      EXPECT_GE(divisor_of(scale).quotient(element), kMaxE4m3) << element << " / " << scale;
    }
  }
}

// The greatest element has the greatest code, and an element is half a step from its code at most.
TEST(QuantizedValues, ScalesOfEightBits) {
  EXPECT_EQ(scale_of(0.0F, 448.0F), 1.0F);
  for (const float greatest : {kMinBf16, kMinF16, 1.0F, 3.140625F, kGreatestF16, kGreatestBf16}) {
    const float fp8 = scale_of(greatest, kMaxE4m3);
    const float int8 = scale_of(greatest, kMaxInt8);
    ASSERT_GT(fp8, 0.0F);
    const float fp8_element = e4m3_to_float(0x7e) * fp8;
    ASSERT_TRUE(std::isfinite(fp8_element));
    if (greatest > 0x1p-120F) {
      EXPECT_EQ(quantize_to_int8(greatest, int8), 127) << greatest;
      EXPECT_EQ(quantize_to_fp8(greatest, fp8), 0x7e) << greatest;
      EXPECT_EQ(rounded(fp8_element, Dtype::kBf16), rounded(greatest, Dtype::kBf16));
    }
    for (int i = -100; i <= 100; ++i) {
      const float element = greatest * (static_cast<float>(i) / 100.0F);
      const double error =
          std::abs(static_cast<double>(dequantize_int8(quantize_to_int8(element, int8), int8)) - element);
      // Scales below 2⁻¹²⁶ have fewer digits: a step is then wrong by up to 2⁻¹⁴⁹ for each of 127.
      ASSERT_LE(error, 0.5001 * int8 + 128 * 0x1p-149) << element;
    }
  }
}

// Scales of rows are bf16, and no product with a quantized value is rounded: what a kernel multiplies in the elements'
// dtype is then rounded as often as what is multiplied in fp32.
TEST(QuantizedValues, ScalesOfRowsAreElements) {
  std::mt19937 random(3);
  for (int i = 0; i < 20'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random()) % 0x7f800000U & (i % 2 == 0 ? 0xffff0000U : 0xffffe000U);
    const auto greatest = std::bit_cast<float>(bits);
    if (!(greatest > 0x1p-100F && greatest < 0x1p120F)) continue;
    for (const float limit : {kMaxE4m3, kMaxInt8}) {
      const float scale = row_scale_of(greatest, limit, kGreatestBf16);
      const auto of = std::bit_cast<std::uint32_t>(scale);
      ASSERT_EQ(of & 0xffffU, 0U) << greatest;
      ASSERT_GE(scale, greatest / limit);
      ASSERT_LT(std::bit_cast<float>(of - 0x10000U), greatest / limit);
      for (int code = 0; code < 256; ++code) {
        const auto byte = static_cast<std::uint8_t>(code);
        const float number = limit == kMaxE4m3 ? e4m3_to_float(byte) : static_cast<float>(std::int8_t(byte));
        if (std::isnan(number)) continue;
        ASSERT_EQ(static_cast<double>(number * scale), static_cast<double>(number) * scale) << code << ", " << scale;
      }
    }
  }
}

TEST(QuantizedValues, ScalesOfRowsAtTheEdges) {
  EXPECT_EQ(row_scale_of(0.0F, kMaxE4m3, kGreatestF16), 1.0F);
  for (const float limit : {kMaxE4m3, kMaxInt8}) {
    for (const float most : {kGreatestF16, kGreatestBf16}) {
      for (const float part : {1.0F, 0.998F, 0.995F, 0.993F}) {  // the greatest code is never more than the dtype holds
        const float greatest = rounded(most * part, most == kGreatestF16 ? Dtype::kF16 : Dtype::kBf16);
        const float scale = row_scale_of(greatest, limit, most);
        const Dtype dtype = most == kGreatestF16 ? Dtype::kF16 : Dtype::kBf16;
        EXPECT_TRUE(std::isfinite(rounded(limit * scale, dtype))) << greatest;
        EXPECT_GE(scale, greatest / limit);
        EXPECT_LE(scale, greatest / limit * 1.0079F);
      }
    }
    // What is no number isn't hidden.
    EXPECT_TRUE(std::isnan(row_scale_of(std::numeric_limits<float>::quiet_NaN(), limit, kGreatestF16)));
    EXPECT_TRUE(std::isinf(row_scale_of(std::numeric_limits<float>::infinity(), limit, kGreatestF16)));
  }
}

TEST(QuantizedValues, TruncationIsTheNearestBelow) {
  std::mt19937 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random()) & 0x7fffffffU;
    const float value = std::bit_cast<float>(bits);
    if (!std::isfinite(value)) continue;
    const float down = truncated_to_bf16(value);
    ASSERT_LE(down, value);
    ASSERT_EQ(rounded(down, Dtype::kBf16), down);
    ASSERT_GT(std::bit_cast<float>(std::bit_cast<std::uint32_t>(down) + 0x10000U), value);
  }
  for (std::uint32_t bits = 0; bits < 0x7bffU; ++bits) {  // every fp16, and what lies between it and the next
    const float least = f16_to_float(static_cast<std::uint16_t>(bits));
    const float next = f16_to_float(static_cast<std::uint16_t>(bits + 1));
    ASSERT_EQ(truncated_to_f16(least), least);
    ASSERT_EQ(truncated_to_f16(0.5F * (least + next)), least);
    ASSERT_EQ(truncated_to_f16(std::nextafter(next, 0.0F)), least);
  }
}

struct Group {
  float scale = 0.0F;
  float zero = 0.0F;
  std::vector<float> back;
};

Group coded(const std::vector<float>& elements, Dtype dtype) {
  const auto [least, greatest] = std::ranges::minmax(elements);
  Group group;
  group.zero = int4_zero_point(least);
  group.scale = truncated(int4_scale(group.zero, greatest), dtype);
  for (const float element : elements) {
    group.back.push_back(
        rounded(dequantize_int4(quantize_to_int4(element, group.scale, group.zero), group.scale, group.zero), dtype));
  }
  return group;
}

// An element comes back within half a step, or, near the greatest, within what the scale lost when it was truncated;
// and what comes back lies between the least and the greatest element.
void expect_near(const std::vector<float>& elements, Dtype dtype) {
  const Group group = coded(elements, dtype);
  const auto [least, greatest] = std::ranges::minmax(elements);
  ASSERT_EQ(rounded(group.scale, dtype), group.scale);
  ASSERT_EQ(rounded(group.zero, dtype), group.zero);
  const double step = group.scale;
  const double lost = static_cast<double>(greatest) - static_cast<double>(least) - 15.0 * step;
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const double element = elements[i];
    // Rounding what comes back to the dtype: half a unit of 8 or 11 digits, or of the subnormals.
    const double unit = std::abs(element) * (dtype == Dtype::kBf16 ? 0x1p-7 : 0x1p-10) +
                        static_cast<double>(dtype == Dtype::kBf16 ? kMinBf16 : kMinF16);
    ASSERT_LE(std::abs(static_cast<double>(group.back[i]) - element), std::max(0.5 * step, lost) * 1.001 + unit)
        << "element " << element << " of " << least << " … " << greatest << ", scale " << step;
    ASSERT_GE(group.back[i], least);
    ASSERT_LE(group.back[i], greatest);
  }
}

TEST(QuantizedValues, FourBitsComeBackWithinHalfAStep) {
  std::mt19937_64 random(2);
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    for (const float magnitude : {1.0F, 0.001F, 300.0F, 2000.0F}) {
      for (const float centre : {0.0F, 1.0F, -7.0F}) {
        std::normal_distribution<float> normal(centre * magnitude, magnitude);
        std::vector<float> elements(32);
        for (float& element : elements) element = rounded(normal(random), dtype);
        expect_near(elements, dtype);
      }
    }
  }
}

TEST(QuantizedValues, FourBitsAtTheEdges) {
  expect_near({0.0F, 0.0F, 0.0F}, Dtype::kBf16);
  expect_near({5.5F, 5.5F}, Dtype::kF16);
  expect_near({kMinBf16, 0.0F, -kMinBf16}, Dtype::kBf16);
  expect_near({20 * kMinBf16, 0.0F, 7 * kMinBf16}, Dtype::kBf16);
  expect_near({100 * kMinF16, 0.0F, 53 * kMinF16}, Dtype::kF16);
  expect_near({kGreatestF16, -kGreatestF16, 1.0F, 30000.0F}, Dtype::kF16);
  expect_near({kGreatestBf16, -kGreatestBf16, 1.0F, 1e38F}, Dtype::kBf16);
  expect_near({kGreatestBf16, 0.0F}, Dtype::kBf16);
  // It does not matter which zero was met first.
  const Group group = coded({-0.0F, 0.0F}, Dtype::kBf16);
  EXPECT_FALSE(std::signbit(group.zero) || std::signbit(group.scale) || std::signbit(group.back[0]));
}

// What a kernel may compute instead.
TEST(QuantizedValues, AnElementIsOneFusedMultiplyAdd) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 200'000; ++i) {
    const auto code = static_cast<std::uint8_t>(random() % 16);
    const bool half = i % 2 == 0;
    const auto bits = [&] { return static_cast<std::uint16_t>(random()); };
    const float scale = std::abs(half ? f16_to_float(bits()) : bf16_to_float(bits()));
    const float zero = half ? f16_to_float(bits()) : bf16_to_float(bits());
    if (!std::isfinite(scale) || !std::isfinite(zero) || !std::isfinite(0.5F * 15.0F * scale)) continue;
    const float fused = std::fma(static_cast<float>(code), scale, zero);
    if (!std::isfinite(fused)) continue;
    const float got = dequantize_int4(code, scale, zero);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got + 0.0F), std::bit_cast<std::uint32_t>(fused + 0.0F))
        << code << " " << scale << " " << zero;
  }
}

// A number that fp64 holds, rounded once, to nearest even.
double rounded_once(double value, Dtype dtype) {
  if (value == 0.0) return value;
  const int least = dtype == Dtype::kBf16 ? -133 : -24;
  const int digits = dtype == Dtype::kBf16 ? 8 : 11;
  const int place = std::max(std::ilogb(value) - digits + 1, least);
  return std::ldexp(std::nearbyint(std::ldexp(value, -place)), place);
}

// What kernels make elements with instead: one rounding, wherever the predicate lets them. Every code, all scales of a
// binade, and zeros of either sign from far below to far above.
TEST(QuantizedValues, OneRoundingWhereItIsTheSame) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    const bool bf16 = dtype == Dtype::kBf16;
    const int digits = bf16 ? 8 : 11, steps = 1 << (digits - 1);
    std::int64_t differ = 0, let = 0;
    for (int i = 0; i < steps; i += bf16 ? 1 : 7) {
      const double scale = std::ldexp(steps + i, bf16 ? -7 : -13);
      for (int exponent = bf16 ? -40 : -24; exponent <= (bf16 ? 24 : 15); ++exponent) {
        for (int n = 0; n < steps; n += bf16 ? 1 : 31) {
          const double magnitude = std::ldexp(steps + n, exponent - digits + 1);
          if (rounded_once(magnitude, dtype) != magnitude) continue;  // fewer digits below the normal numbers
          const auto s = static_cast<float>(scale), z = static_cast<float>(magnitude);
          const bool twice = bf16 ? int4_rounds_twice_to_bf16(s, z) : int4_rounds_twice_to_f16(s, z);
          for (int code = 0; code < 16; ++code) {
            for (const float zero : {z, -z}) {
              const double once = rounded_once(code * scale + static_cast<double>(zero), dtype);
              if (std::abs(once) > (bf16 ? kGreatestBf16 : kGreatestF16)) continue;
              const bool same = once == rounded(dequantize_int4(static_cast<std::uint8_t>(code), s, zero), dtype);
              ASSERT_TRUE(same || twice) << code << " * " << s << " + " << zero;
              differ += same ? 0 : 1;
              let += twice ? 0 : 1;
            }
          }
        }
      }
    }
    EXPECT_GT(differ, 0) << "the predicate would have nothing to do";
    EXPECT_GT(let, 1'000'000);
  }
}

// By squared_distance(), and of several the first: also where many are equal, or too far away to tell.
TEST(QuantizedValues, TheNearestVectorIsTheFirstOfThem) {
  std::mt19937 random(7);
  for (const int width : {2, 4, 8}) {
    for (const int values : {2, 5, 1000}) {
      std::vector<float> vectors(static_cast<std::size_t>(width * kCodebookVectors));
      std::vector<float> by_channel(vectors.size());
      const auto count = static_cast<unsigned>(values);
      const auto drawn = [&] { return static_cast<float>(static_cast<int>(random() % count) - values / 2); };
      for (int v = 0; v < kCodebookVectors; ++v) {
        for (int c = 0; c < width; ++c) {
          const float number = drawn();
          vectors[static_cast<std::size_t>(v * width + c)] = number;
          by_channel[static_cast<std::size_t>(c * kCodebookVectors + v)] = number;
        }
      }
      for (int i = 0; i < 300; ++i) {
        std::vector<float> element(static_cast<std::size_t>(width));
        for (float& number : element) number = i == 0 ? kGreatestBf16 : drawn();
        int nearest = 0;
        for (int v = 1; v < kCodebookVectors; ++v) {
          const auto distance = [&](int to) {
            return squared_distance(element.data(), vectors.data() + to * width, width);
          };
          if (distance(v) < distance(nearest)) nearest = v;
        }
        ASSERT_EQ(best_codebook_ops().nearest(element.data(), by_channel.data(), width), nearest)
            << width << ", " << values << ", " << i;
      }
    }
  }
}

TEST(QuantizedValues, EveryChannelOfAGroupHasItsPlace) {
  for (const auto& [dim, group] : {std::pair{128, 32}, {128, 64}, {64, 64}, {96, 32}, {256, 64}}) {
    std::vector<int> seen(static_cast<std::size_t>(dim));
    for (std::int64_t c = 0; c < dim; ++c) {
      const ScaleOffset place = scale_offset_of(c, dim, group);
      ASSERT_LT(place.token, group);
      ASSERT_LT(place.pair, dim / group);
      ++seen[static_cast<std::size_t>(place.token * (dim / group) + place.pair)];
    }
    EXPECT_EQ(std::ranges::count(seen, 1), dim);
  }
}

}  // namespace
}  // namespace ringattn::testing
