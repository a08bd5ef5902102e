// SPDX-License-Identifier: Apache-2.0
#include "base/host.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace ringattn {
namespace {

TEST(Host, IsDescribed) {
  EXPECT_FALSE(host_name().empty());
  EXPECT_FALSE(cpu_model().empty());
  EXPECT_GE(usable_processors().count, 1);
  EXPECT_EQ(usable_processors().set, usable_processors().set);
}

TEST(Host, ResidentMemoryGrowsWithTouchedPages) {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  const std::size_t before = resident_bytes();
  std::vector<char> touched(kBytes);
  std::memset(touched.data(), 1, touched.size());
  EXPECT_GE(resident_bytes(), before + kBytes / 2);
  EXPECT_EQ(touched[kBytes / 2], 1);
}

}  // namespace
}  // namespace ringattn
