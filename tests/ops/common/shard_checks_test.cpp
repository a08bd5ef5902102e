// SPDX-License-Identifier: Apache-2.0
// Which tensors of a run are apart: against all their bytes, and what has to pass. And sinks.
#include "ops/common/shard_checks.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "base/error.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
namespace {

using ShardAxes = std::array<std::int64_t, 3>;

// In memory that is never touched.
TensorView at(std::int64_t element, const ShardAxes& shape, std::int64_t token_stride, std::int64_t head_stride,
              Dtype dtype = Dtype::kF32) {
  const auto address = static_cast<std::uintptr_t>(0x10000000 + element * static_cast<std::int64_t>(size_of(dtype)));
  return {reinterpret_cast<const void*>(address), dtype, shape[0], shape[1], shape[2], token_stride, head_stride};
}

bool passes(const TensorView& result, const TensorView& other) {
  try {
    check_apart("out", result, "q", other);
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_EQ(error.problem().text(), "out overlaps q");
    return false;
  }
}

std::set<const std::byte*> numbers(const TensorView& view) {
  std::set<const std::byte*> all;
  for (std::int64_t token = 0; token < view.tokens; ++token) {
    for (std::int64_t head = 0; head < view.heads; ++head) {
      const auto bytes = view.dim * static_cast<std::int64_t>(size_of(view.dtype));
      for (std::int64_t i = 0; i < bytes; ++i) all.insert(view.at(token, head) + i);
    }
  }
  return all;
}

TEST(Apart, NothingThatOverlapsPasses) {
  std::mt19937 random(1);
  const auto draw = [&](int least, int most) {
    return static_cast<std::int64_t>(std::uniform_int_distribution<int>(least, most)(random));
  };
  int apart = 0, refused = 0, too_strict = 0;
  for (int i = 0; i < 4000; ++i) {
    std::vector<TensorView> views;
    for (int side = 0; side < 2; ++side) {
      const ShardAxes shape{draw(0, 4), draw(1, 3), draw(1, 4)};
      const std::int64_t heads_apart = draw(0, 3) == 0 ? draw(-9, 9) : shape[2] + draw(0, 4);
      const std::int64_t tokens_apart = draw(0, 3) == 0 ? draw(-30, 30) : shape[1] * heads_apart + draw(0, 8);
      views.push_back(at(draw(0, 60), shape, tokens_apart, heads_apart, side == 0 ? Dtype::kF32 : Dtype::kBf16));
    }
    const std::set<const std::byte*> first = numbers(views[0]);
    bool overlaps = false;
    for (const std::byte* number : numbers(views[1])) overlaps = overlaps || first.contains(number);
    const bool passed = passes(views[0], views[1]);
    ASSERT_EQ(passed, passes(views[1], views[0]));
    ASSERT_FALSE(passed && overlaps) << "case " << i;
    apart += passed ? 1 : 0;
    refused += overlaps ? 1 : 0;
    too_strict += !passed && !overlaps ? 1 : 0;
  }
  EXPECT_GT(apart, 500);
  EXPECT_GT(refused, 500);
  EXPECT_LT(too_strict, 1200) << "views whose rows take turns in no order are refused, others are not";
}

TEST(Apart, ColumnsHeadsAndNeighboursPass) {
  const ShardAxes shape{100, 4, 64};
  constexpr std::int64_t kRow = 4 * 64;
  const TensorView dense = at(0, shape, kRow, 64);
  EXPECT_TRUE(passes(dense, at(100 * kRow, shape, kRow, 64))) << "behind";
  EXPECT_FALSE(passes(dense, at(100 * kRow - 1, shape, kRow, 64)));
  EXPECT_FALSE(passes(dense, dense));
  EXPECT_TRUE(passes(at(0, shape, 3 * kRow, 64), at(kRow, shape, 3 * kRow, 64))) << "columns of a projection";
  EXPECT_TRUE(passes(at(2 * kRow, shape, 3 * kRow, 64), at(0, shape, 3 * kRow, 64)));
  EXPECT_TRUE(passes(at(0, shape, 2 * kRow, 128), at(64, shape, 2 * kRow, 128))) << "heads that take turns";
  EXPECT_TRUE(passes(at(99 * 2 * kRow, shape, -2 * kRow, 64), at(kRow, shape, 2 * kRow, 64))) << "back to front";
  EXPECT_FALSE(passes(at(99 * 2 * kRow, shape, -2 * kRow, 64), at(1, shape, 2 * kRow, 64)));
  EXPECT_TRUE(passes(at(0, {0, 4, 64}, kRow, 64), dense)) << "nothing";
  EXPECT_TRUE(passes(TensorView{}, dense)) << "what there is not";
  EXPECT_TRUE(passes(at(0, {1, 4, 64}, 0, 64), at(kRow, {1, 4, 64}, 0, 64))) << "one row, whose stride says nothing";
}

TEST(Sinks, AreGivenWhereTheJobHasThem) {
  const float sink = 0.0F;
  check_sinks("AttentionSpec", &sink, true);
  check_sinks("AttentionSpec", nullptr, false);
  const Error missing = testing::error_of([&] { check_sinks("MlaSpec", nullptr, true); });
  EXPECT_EQ(missing.code(), ErrorCode::kUsage);
  EXPECT_STREQ(missing.what(), "sinks are missing (the job has them). MlaSpec::sinks says whether a job has sinks.");
  EXPECT_STREQ(testing::error_of([&] { check_sinks("AttentionSpec", &sink, false); }).what(),
               "sinks are given (the job has none). AttentionSpec::sinks says whether a job has sinks.");
}

}  // namespace
}  // namespace ringattn
