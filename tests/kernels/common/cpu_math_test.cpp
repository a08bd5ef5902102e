// SPDX-License-Identifier: Apache-2.0
// The vector functions of the CPU attention kernel, against double precision. Compiled for the build's baseline target;
// the others differ at most in how a multiply-add is rounded.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/common/cpu/math-inl.hpp"
#include "kernels/common/cpu/pack-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

using One = hn::CappedTag<float, 1>;

float exp2_of(float x) { return hn::GetLane(exp2_in_range(One(), hn::Set(One(), x))); }
float unbounded_exp2_of(float x) { return hn::GetLane(exp2(One(), hn::Set(One(), x))); }
float weight_of(float x) { return hn::GetLane(weight(One(), hn::Set(One(), x))); }
float tanh_of(float x) { return hn::GetLane(tanh(One(), hn::Set(One(), x))); }
template <Dtype kDtype>
float rounded_to(float x) {
  return hn::GetLane(round_to<kDtype>(One(), hn::Set(One(), x)));
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

namespace ringattn::cpu {
namespace {

using HWY_NAMESPACE::exp2_of;
using HWY_NAMESPACE::rounded_to;
using HWY_NAMESPACE::tanh_of;
using HWY_NAMESPACE::unbounded_exp2_of;
using HWY_NAMESPACE::weight_of;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Distance in units of the last place of the exact result.
double ulps(float value, double exact) {
  const int exponent = std::ilogb(exact);
  return std::abs(static_cast<double>(value) - exact) / std::ldexp(1.0, exponent - 23);
}

TEST(CpuMath, Exp2) {
  double worst = 0.0;
  for (double x = -126.0; x < 127.0; x += 1.23e-4) {
    const auto rounded = static_cast<float>(x);
    worst = std::max(worst, ulps(exp2_of(rounded), std::exp2(static_cast<double>(rounded))));
  }
  EXPECT_LT(worst, 1.1);
  for (int n = -126; n <= 127; ++n) EXPECT_EQ(exp2_of(static_cast<float>(n)), std::ldexp(1.0F, n));
  EXPECT_TRUE(std::isnan(exp2_of(std::nanf(""))));
}

TEST(CpuMath, Exp2OfAnyNumber) {
  for (float x = -126.0F; x < 127.0F; x += 0.37F) EXPECT_EQ(unbounded_exp2_of(x), exp2_of(x));
  for (const float x : {127.6F, 128.0F, 1000.0F, kInfinity}) EXPECT_EQ(unbounded_exp2_of(x), kInfinity);
  for (const float x : {-126.1F, -1000.0F, -kInfinity}) EXPECT_EQ(unbounded_exp2_of(x), 0.0F);
  EXPECT_TRUE(std::isnan(unbounded_exp2_of(std::nanf(""))));
}

TEST(CpuMath, RoundsToTheDtype) {
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 1021) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    const float bf16 = rounded_to<Dtype::kBf16>(value);
    const float f16 = rounded_to<Dtype::kF16>(value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(bf16) && std::isnan(f16));
      continue;
    }
    ASSERT_EQ(bf16, bf16_to_float(float_to_bf16(value))) << value;
    ASSERT_EQ(f16, f16_to_float(float_to_f16(value))) << value;
    ASSERT_EQ(rounded_to<Dtype::kF32>(value), value);
  }
  EXPECT_EQ(rounded_to<Dtype::kF16>(65519.0F), 65504.0F);
  EXPECT_EQ(rounded_to<Dtype::kF16>(-65520.0F), -kInfinity);
}

TEST(CpuMath, WeightKeepsNanAndInfinity) {
  EXPECT_EQ(weight_of(0.0F), 1.0F);
  EXPECT_EQ(weight_of(-0.0F), 1.0F);
  EXPECT_EQ(weight_of(-kInfinity), 0.0F);
  EXPECT_FALSE(std::signbit(weight_of(-kInfinity)));
  EXPECT_EQ(weight_of(-99.0F), std::ldexp(1.0F, -99));
  for (const float x : {-100.0F, -101.5F, -1e6F, std::numeric_limits<float>::lowest()}) {
    EXPECT_EQ(weight_of(x), std::ldexp(1.0F, -100));
  }
  EXPECT_TRUE(std::isnan(weight_of(std::nanf(""))));
}

TEST(CpuMath, Tanh) {
  double worst = 0.0;
  for (double x = 1e-6; x < 12.0; x *= 1.00001) {
    const auto rounded = static_cast<float>(x);
    worst = std::max(worst, ulps(tanh_of(rounded), std::tanh(static_cast<double>(rounded))));
    ASSERT_EQ(tanh_of(-rounded), -tanh_of(rounded));
  }
  EXPECT_LT(worst, 2.0);
  EXPECT_EQ(tanh_of(0.0F), 0.0F);
  EXPECT_EQ(tanh_of(1e-30F), 1e-30F);
  EXPECT_EQ(tanh_of(50.0F), 1.0F);
  EXPECT_EQ(tanh_of(kInfinity), 1.0F);
  EXPECT_EQ(tanh_of(-kInfinity), -1.0F);
  EXPECT_TRUE(std::isnan(tanh_of(std::nanf(""))));
}

}  // namespace
}  // namespace ringattn::cpu
