// SPDX-License-Identifier: Apache-2.0
// Synthetic input is a function of (seed, tensor, token, head, dim): golden values, moments, independence of the shard.
#include "kernels/common/synthetic.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "tests/support/random_runs.hpp"

namespace ringattn {
namespace {

using testing::deal_randomly;

std::vector<std::byte> made(std::uint64_t seed, SyntheticTensor tensor, Dtype dtype, std::span<const PackedRun> runs,
                            std::int64_t heads, std::int64_t dim, int threads = 1) {
  const std::int64_t tokens = total_tokens(runs);
  std::vector<std::byte> data(static_cast<std::size_t>(tokens * heads * dim) * size_of(dtype));
  fill_synthetic(seed, tensor, runs, dense_view(data.data(), dtype, tokens, heads, dim), threads);
  return data;
}

// Pinned: every version of the program, and every device, must make the same input.
TEST(Synthetic, HasGoldenValues) {
  EXPECT_EQ(synthetic_value(0, SyntheticTensor::kQ, 0, 0, 0), 0x1.aa00d8p+0F);
  EXPECT_EQ(synthetic_value(0, SyntheticTensor::kQ, 0, 0, 1), 0x1.8317d2p+0F);
  EXPECT_EQ(synthetic_value(42, SyntheticTensor::kV, 5'000'000'000, 17, 101), 0x1.fde9bep+0F);
  EXPECT_EQ(synthetic_value(~std::uint64_t{0}, SyntheticTensor::kSinks, 1, 2, 3), 0x1.cf8356p-1F);
}

TEST(Synthetic, DependsOnEveryArgument) {
  const float base = synthetic_value(1, SyntheticTensor::kQ, 2, 3, 4);
  EXPECT_NE(base, synthetic_value(2, SyntheticTensor::kQ, 2, 3, 4));
  EXPECT_NE(base, synthetic_value(1 | std::uint64_t{1} << 40, SyntheticTensor::kQ, 2, 3, 4));
  EXPECT_NE(base, synthetic_value(1, SyntheticTensor::kK, 2, 3, 4));
  EXPECT_NE(base, synthetic_value(1, SyntheticTensor::kQ, 3, 3, 4));
  EXPECT_NE(base, synthetic_value(1, SyntheticTensor::kQ, 2 + (std::int64_t{1} << 32), 3, 4));
  EXPECT_NE(base, synthetic_value(1, SyntheticTensor::kQ, 2, 4, 4));
  EXPECT_NE(base, synthetic_value(1, SyntheticTensor::kQ, 2, 3, 5));
  EXPECT_NE(base, synthetic_value(1, SyntheticTensor::kQ, 2, 3, 6));
}

// The mean of n independent values has a standard error of 1/√n, the variance one of √((κ − 1)/n) with kurtosis κ =
// 2.7. Five standard errors are allowed.
TEST(Synthetic, IsNearlyNormal) {
  constexpr std::int64_t kTokens = 4096;
  constexpr std::int64_t kHeads = 2;
  constexpr std::int64_t kDim = 64;
  constexpr double kCount = kTokens * kHeads * kDim;
  const PackedRun all[] = {{0, kTokens}};
  for (const SyntheticTensor tensor : {SyntheticTensor::kQ, SyntheticTensor::kK, SyntheticTensor::kV}) {
    const auto data = made(3, tensor, Dtype::kF32, all, kHeads, kDim);
    double sum = 0.0;
    double squares = 0.0;
    double fourth = 0.0;
    double neighbours = 0.0;
    double before = 0.0;
    double most = 0.0;
    for (std::size_t i = 0; i < data.size(); i += sizeof(float)) {
      const double value = load_element(data.data() + i, Dtype::kF32);
      sum += value;
      squares += value * value;
      fourth += value * value * value * value;
      neighbours += value * before;
      before = value;
      most = std::max(most, std::abs(value));
    }
    EXPECT_NEAR(sum / kCount, 0.0, 5.0 / std::sqrt(kCount));
    EXPECT_NEAR(squares / kCount, 1.0, 5.0 * std::sqrt(1.7 / kCount));
    EXPECT_NEAR(fourth / kCount, 2.7, 5.0 * std::sqrt(30.0 / kCount));
    EXPECT_NEAR(neighbours / kCount, 0.0, 5.0 / std::sqrt(kCount));
    EXPECT_LT(most, 3.4642F);
    EXPECT_GT(most, 3.0);
  }
}

TEST(Synthetic, DoesNotDependOnTheShardOrThreads) {
  constexpr std::int64_t kTokens = 500;
  std::mt19937_64 random(11);
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const std::int64_t dim : {1, 7, 8, 128, 131, 192, 256}) {
      constexpr std::int64_t kHeads = 2;
      const auto row_bytes = static_cast<std::size_t>(kHeads * dim) * size_of(dtype);
      const PackedRun all[] = {{0, kTokens}};
      const auto whole = made(5, SyntheticTensor::kK, dtype, all, kHeads, dim);
      for (const std::int64_t token : {0, 1, 499}) {
        for (const std::int64_t d : {std::int64_t{0}, dim / 2, dim - 1}) {
          const std::byte* at = whole.data() + static_cast<std::size_t>(token) * row_bytes +
                                static_cast<std::size_t>(dim + d) * size_of(dtype);
          std::byte expected[4];
          store_element(expected, dtype, synthetic_value(5, SyntheticTensor::kK, token, 1, d));
          EXPECT_EQ(std::memcmp(at, expected, size_of(dtype)), 0);
        }
      }
      for (const auto& runs : deal_randomly(kTokens, 3, 40, random)) {
        const auto part = made(5, SyntheticTensor::kK, dtype, runs, kHeads, dim, 3);
        std::size_t row = 0;
        for (const PackedRun& run : runs) {
          const auto bytes = static_cast<std::size_t>(run.tokens()) * row_bytes;
          EXPECT_EQ(std::memcmp(part.data() + row * row_bytes,
                                whole.data() + static_cast<std::size_t>(run.begin) * row_bytes, bytes),
                    0);
          row += static_cast<std::size_t>(run.tokens());
        }
      }
    }
  }
}

TEST(Synthetic, LeavesTheGapsOfStridedRowsAlone) {
  std::vector<float> data(10 * 12, 99.0F);
  const PackedRun runs[] = {{7, 17}};
  fill_synthetic(1, SyntheticTensor::kV, runs, {data.data(), Dtype::kF32, 10, 2, 4, 12, 5});
  for (std::int64_t row = 0; row < 10; ++row) {
    for (std::int64_t i = 0; i < 12; ++i) {
      const bool inside = i < 4 || (i >= 5 && i < 9);
      const float expected =
          inside ? synthetic_value(1, SyntheticTensor::kV, 7 + row, i >= 5, i >= 5 ? i - 5 : i) : 99.0F;
      EXPECT_EQ(data[static_cast<std::size_t>(row * 12 + i)], expected);
    }
  }
}

// The matrices of heads [5, 9), made as those of all heads are.
TEST(Synthetic, MakesTheWeightsOfSomeHeads) {
  constexpr std::int64_t kOuter = 6;
  constexpr std::int64_t kInner = 40;
  const PackedRun all[] = {{0, 12}};
  const PackedRun some[] = {{5, 9}};
  for (const SyntheticTensor tensor : {SyntheticTensor::kWeightKeys, SyntheticTensor::kWeightValues}) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      const auto whole = made(5, tensor, dtype, all, kOuter, kInner);
      const auto part = made(5, tensor, dtype, some, kOuter, kInner, 3);
      const std::size_t head_bytes = kOuter * kInner * size_of(dtype);
      EXPECT_EQ(std::memcmp(part.data(), whole.data() + 5 * head_bytes, 4 * head_bytes), 0);
      for (std::int64_t i = 0; i < kOuter * kInner; ++i) {
        std::byte expected[4];
        const float value = synthetic_value(5, tensor, 5, i / kInner, i % kInner);
        store_element(expected, dtype, value * synthetic_scale(tensor, kInner));
        EXPECT_EQ(std::memcmp(part.data() + static_cast<std::size_t>(i) * size_of(dtype), expected, size_of(dtype)), 0);
      }
    }
  }
  EXPECT_EQ(synthetic_scale(SyntheticTensor::kWeightKeys, 512), 0x1.6a09e6p-5F);  // 1 / √512
  EXPECT_EQ(synthetic_scale(SyntheticTensor::kWeightValues, 64), 0.125F);
  EXPECT_EQ(synthetic_scale(SyntheticTensor::kLatent, 512), 1.0F);
}

TEST(Synthetic, TensorsAreUnlikeEachOther) {
  std::set<float> values;
  for (std::uint32_t tensor = 0; tensor < 8; ++tensor) {
    values.insert(synthetic_value(1, SyntheticTensor{tensor}, 2, 3, 4));
  }
  EXPECT_EQ(values.size(), 8U);
}

TEST(Synthetic, MakesSinks) {
  const std::vector<float> sinks = synthetic_sinks(9, 4);
  ASSERT_EQ(sinks.size(), 4U);
  EXPECT_EQ(sinks[2], synthetic_value(9, SyntheticTensor::kSinks, 0, 2, 0));
  EXPECT_NE(sinks[0], sinks[1]);
}

}  // namespace
}  // namespace ringattn
