// SPDX-License-Identifier: Apache-2.0
// A viewer nests what overlaps in one lane, so ranges of heads that are under way at once have lanes of their own.
#include "launch/trace.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ringattn::testing {
namespace {

using Kind = ScanPart::Kind;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(TraceOfAScan, HasALaneForEachPartThatOverlapsAnother) {
  const HeadRange first{0, 40};
  const HeadRange second{40, 40};
  const std::string text = trace_text(
      std::vector<std::vector<ScanPart>>{{{Kind::kFold, first, 0.0, 2e-6},
                                          {Kind::kFold, second, 0.0, 4e-6},
                                          {Kind::kFinish, first, 4e-6, 5e-6},
                                          {Kind::kFinish, second, 5e-6, 6e-6}},
                                         {{Kind::kFold, first, 0.0, 2e-6}, {Kind::kFold, second, 2e-6, 4e-6}}},
      {"a", "b"});
  const auto lane = [&](int rank, int tid, const std::string& name) {
    return has(text, R"({"ph":"M","name":"thread_name","pid":)" + std::to_string(rank) + R"(,"tid":)" +
                         std::to_string(tid) + R"(,"args":{"name":")" + name + R"("}})");
  };
  const auto event = [&](int rank, int tid, const std::string& heads, const std::string& category) {
    return has(text, R"({"ph":"X","name":"heads )" + heads + R"(","cat":")" + category + R"(","pid":)" +
                         std::to_string(rank) + R"(,"tid":)" + std::to_string(tid) + ",");
  };
  EXPECT_TRUE(lane(0, 0, "fold") && lane(0, 1, "fold") && lane(0, 2, "wait") && lane(0, 3, "finish") &&
              lane(0, 4, "states"))
      << text;
  EXPECT_TRUE(event(0, 0, "0 to 39", "fold") && event(0, 1, "40 to 79", "fold")) << text;
  EXPECT_TRUE(event(0, 3, "0 to 39", "finish") && event(0, 3, "40 to 79", "finish")) << text;
  EXPECT_TRUE(lane(1, 0, "fold") && lane(1, 1, "wait") && lane(1, 2, "finish") && lane(1, 3, "states")) << text;
  EXPECT_TRUE(event(1, 0, "0 to 39", "fold") && event(1, 0, "40 to 79", "fold")) << text;
}

}  // namespace
}  // namespace ringattn::testing
