// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/shapes.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "comm/threads.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn {
namespace {

Job job_of(std::int64_t tokens) {
  return {make_spec(Dtype::kBf16, 2, 1, 64, {-1, 0}), uniform_batch(1, tokens, tokens)};
}

TEST(Shapes, VaryWhatIsNotHeldFixed) {
  const JobInput job = JobInput::synthetic(job_of(1000), 1);
  // Alone one layout; of two ranks all three; two block sizes each.
  EXPECT_EQ(shapes_of({{1, 2}, {}, {}}, job, 64).size(), 2U + 6U);
  const std::vector<Shape> fixed = shapes_of({{2, 3}, LayoutRequest{LayoutKind::kZigzag, 0}, 128}, job, 64);
  ASSERT_EQ(fixed.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(fixed[i].ranks, static_cast<int>(i) + 2);
    EXPECT_EQ(fixed[i].layout.kind, LayoutKind::kZigzag);
    EXPECT_EQ(fixed[i].block, 128);
  }
  const std::vector<Shape> alone = shapes_of({{1}, {}, {}}, job, 64);
  ASSERT_EQ(alone.size(), 2U);
  EXPECT_EQ(alone[0].block, 0);
  EXPECT_EQ(alone[1].block % 64, 0);
  EXPECT_LT(alone[1].block, 1000);
}

TEST(Shapes, GiveTheSameBits) {
  const JobInput job = JobInput::synthetic(job_of(300), 1);
  const std::vector<Shape> shapes = shapes_of({{1, 3}, {}, {}}, job, 64);
  std::vector<std::vector<std::int64_t>> blocks(3);
  run_ranks(make_threads_world(3), [&](Transport& world) {
    Options options;
    options.kernel.backend = "cpu";
    options.threads = 1;
    run_shapes(job, options, shapes, world, [&](const Shape&, const ShapeResult& result) {
      EXPECT_FALSE(result.difference);
      blocks[static_cast<std::size_t>(world.rank())].push_back(result.blocks);
    });
  });
  for (const auto& of_rank : blocks) EXPECT_EQ(of_rank.size(), shapes.size());
  EXPECT_GT(blocks[0].back(), 1);
}

}  // namespace
}  // namespace ringattn
