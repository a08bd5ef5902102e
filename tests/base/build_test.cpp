// SPDX-License-Identifier: Apache-2.0
#include "base/build.hpp"

#include <gtest/gtest.h>

namespace ringattn {
namespace {

TEST(Build, IsNamed) {
  EXPECT_EQ(version(), "0.1.0");
  EXPECT_FALSE(git_revision().empty());
  EXPECT_FALSE(compiler().empty());
  const std::string id = build_id();
  EXPECT_GE(id.size(), 16U) << "link with --build-id: ranks compare it";
  EXPECT_EQ(id.find_first_not_of("0123456789abcdef"), std::string::npos);
}

}  // namespace
}  // namespace ringattn
