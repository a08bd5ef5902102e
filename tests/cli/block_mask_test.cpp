// SPDX-License-Identifier: Apache-2.0
// --block-mask: the same bits however many ranks there are, the oracle, plans, and words that make no pattern.
#include <gtest/gtest.h>

#include <string>

#include "tests/cli/tool.hpp"

namespace ringattn::testing {
namespace {

Words listed_job(const std::string& lists) { return Words{"--block-mask", lists} + small_job(); }

TEST(BlockMask, EverythingIsTheJobWithoutIt) {
  const Finished dense = tool(Words{"run", "--quiet"} + small_job());
  ASSERT_EQ(dense.code, 0) << dense.err;
  const Finished all = tool(Words{"run", "--quiet", "--ranks", "2"} + listed_job("all+block:128"));
  ASSERT_EQ(all.code, 0) << all.err;
  EXPECT_EQ(digest_of(all.out), digest_of(dense.out));
}

TEST(BlockMask, VerifiesInOtherShapesAndAgainstTheOracle) {
  for (const std::string lists : {"window:16+global:8", "bigbird:8,8,1,3+heads:each", "topk:2", "strided:100"}) {
    const Finished shapes = tool(Words{"verify", "--ranks", "3"} + listed_job(lists));
    EXPECT_EQ(shapes.code, 0) << lists << shapes.out << shapes.err;
    const Finished oracle = tool(Words{"verify", "--against", "oracle", "--ranks", "2"} + listed_job(lists));
    EXPECT_EQ(oracle.code, 0) << lists << oracle.out << oracle.err;
    EXPECT_TRUE(has(oracle.out, "lists keep ")) << oracle.out;
  }
}

TEST(BlockMask, ShowsInPlansAndJobs) {
  const Finished plan = tool({"plan", "--seq", "64k", "--world", "4", "--block-mask", "window:1k+global:128"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_TRUE(has(plan.out + plan.err, "lists of 128x128 blocks")) << plan.out << plan.err;
  EXPECT_TRUE(has(plan.out + plan.err, "% of the pairs")) << plan.out << plan.err;
  const Finished top = tool({"plan", "--seq", "1k", "--block-mask", "topk:2"});
  EXPECT_EQ(top.code, 2) << top.out;  // rows are needed
}

TEST(BlockMask, WordsThatMakeNoPattern) {
  const Finished run = tool(Words{"run"} + listed_job("windw:16"));
  EXPECT_EQ(run.code, 2);
  EXPECT_TRUE(has(run.err, "did you mean window?")) << run.err;
  EXPECT_EQ(tool(Words{"run"} + listed_job("none.safetensors")).code, 3);
}

}  // namespace
}  // namespace ringattn::testing
