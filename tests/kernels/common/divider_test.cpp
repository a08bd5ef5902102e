// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/cuda/divider.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>

namespace ringattn::cuda {
namespace {

constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();

void expect_quotients(std::int32_t d, const std::int32_t n) {
  EXPECT_EQ(Divider(d).quotient(n), n / d) << n << " / " << d;
}

TEST(Divider, EndsOfQuotients) {
  for (std::int32_t d = 1; d <= 4096; ++d) {
    for (const std::int32_t quotient : {0, 1, 2, 1000, kMax / d}) {
      const std::int32_t first = quotient * d;
      expect_quotients(d, first);
      if (first > 0) expect_quotients(d, first - 1);
      if (first < kMax) expect_quotients(d, first + 1);
    }
    expect_quotients(d, kMax);
  }
}

TEST(Divider, AnyNumbers) {
  std::mt19937_64 generator(1);
  std::uniform_int_distribution<std::int32_t> numbers(0, kMax);
  for (int i = 0; i < 1'000'000; ++i) {
    const int digits = static_cast<int>(generator() % 31);
    expect_quotients(1 + (numbers(generator) >> digits), numbers(generator));
  }
}

TEST(Divider, ByOneUnlessToldOtherwise) {
  expect_quotients(1, kMax);
  EXPECT_EQ(Divider().quotient(kMax), kMax);
}

}  // namespace
}  // namespace ringattn::cuda
