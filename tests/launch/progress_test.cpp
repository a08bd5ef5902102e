// SPDX-License-Identifier: Apache-2.0
#include "launch/progress.hpp"

#include <gtest/gtest.h>

namespace ringattn {
namespace {

// 0.1 s before the first of three blocks, which has a millionth of the work, is no measure of the other two.
TEST(Progress, TheTimeLeftFollowsWhatCameAfterTheFirstCount) {
  const StepCount first{1, 3, 1e-6};
  TimeLeft time;
  time.begin(first, 0.1);
  EXPECT_EQ(time.seconds_left(first, 0.1), std::nullopt);
  EXPECT_DOUBLE_EQ(time.seconds_left({2, 3, 0.25 + 1e-6}, 0.6).value(), 0.5 * (0.75 - 1e-6) / 0.25);
  EXPECT_EQ(time.seconds_left({3, 3, 1.0}, 2.0), std::nullopt);
}

TEST(Progress, TheTimeLeftCountsFromWhereNothingWasDone) {
  TimeLeft time;
  time.begin({0, 4}, 0.0);
  EXPECT_DOUBLE_EQ(time.seconds_left({1, 4}, 2.0).value(), 6.0);
  EXPECT_DOUBLE_EQ(time.seconds_left({2, 4}, 4.0).value(), 4.0);
}

TEST(Progress, TextHasTheTimeLeftWhereItIsKnown) {
  EXPECT_EQ(progress_text("block", {1, 3}, 0.13, std::nullopt), "block 1 of 3, 0.1 s");
  EXPECT_EQ(progress_text("block", {2, 3}, 4.08, 12.34), "block 2 of 3, 4.1 s, about 12.3 s left");
}

}  // namespace
}  // namespace ringattn
