// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"

#include <gtest/gtest.h>

namespace ringattn {
namespace {

TEST(Error, FollowsTheGrammar) {
  try {
    fail(ErrorCode::kFile, "K has 12 heads", "Q has 32", "Check the file.");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "K has 12 heads (Q has 32). Check the file.");
    EXPECT_EQ(error.code(), ErrorCode::kFile);
  }
  EXPECT_THROW(fail(ErrorCode::kInternal, "x"), Error);
}

TEST(Error, SuggestsOnlyWhatIsNear) {
  const std::string_view names[] = {"striped", "zigzag", "contiguous"};
  EXPECT_EQ(nearest_name("zig-zag", names, 3), "zigzag");
  EXPECT_EQ(nearest_name("stripe", names, 3), "striped");
  EXPECT_EQ(nearest_name("blockwise", names, 3), "");
  const std::string_view letters[] = {"q", "k", "v", "seq", "run"};
  EXPECT_EQ(nearest_name("zz", letters, 5), "");
  EXPECT_EQ(nearest_name("x", letters, 5), "");
  EXPECT_EQ(nearest_name("foo", letters, 5), "");
  EXPECT_EQ(nearest_name("kk", letters, 5), "k");
  EXPECT_EQ(nearest_name("rn", letters, 5), "run");
  EXPECT_EQ(nearest_name("Q", letters, 5), "q");
}

}  // namespace
}  // namespace ringattn
