// SPDX-License-Identifier: Apache-2.0
// Runs that a graph can't hold are refused with the reason, and which ones these are: what a kernel on a device
// prepares is seen without one.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "attention/ring/ring_runs.hpp"
#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/registry.hpp"
#include "ops/attention/plan_summary.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

std::unique_ptr<Backend> host_backend() {
  return choose_kernel(make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), KernelRequest{"cpu", "auto"})
      .row->make_backend({1, 0});
}

TEST(Capture, IsRefusedWhereBlocksShareTables) {
  RingRuns::check_capture_of({});
  const std::vector<PreparedTask> own{0, 1, 2};
  RingRuns::check_capture_of(own);
  const std::vector<PreparedTask> shared{0, kNotPrepared, 2};
  const Error error = error_of([&] { RingRuns::check_capture_of(shared); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_STREQ(
      error.what(),
      "a graph can't hold this run (its 3 blocks share memory for their tables). Use larger blocks, or enqueue "
      "it outside of the capture.");
}

TEST(Capture, IsRefusedWhereRanksExchangeBlocks) {
  const auto check = [](Transport& world) {
    const Collective collective(world, Timeouts(20.0));
    const auto backend = host_backend();
    RingRuns(collective, world, *backend, {}).check_capture_alone();
  };
  check(*make_self_transport());
  run_threads_world(3, {}, [&](Transport& world) {
    const Error error = error_of([&] { check(world); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_STREQ(error.what(),
                 "a graph can't hold this run (transport threads exchanges blocks with 2 other ranks, which a replay "
                 "would not do). Enqueue it outside of the capture.");
  });
}

TEST(Capture, IsRefusedInOneWording) {
  run_threads_world(2, {}, [&](Transport& world) {
    const Error error = error_of([&] { refuse_capture("this scan", world, "sends states to other ranks"); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_STREQ(error.what(),
                 "a graph can't hold this scan (transport threads sends states to other ranks, which a replay would "
                 "not do). Enqueue it outside of the capture.");
    check_capture(*host_backend(), {}, "this scan", world, "sends states to other ranks");  // nothing is captured
  });
}

// How many tasks of a job on one rank have tables of their own.
std::int64_t prepared_tasks(const AttentionRow& row, const AttentionSpec& spec, std::int64_t tokens, std::int64_t block,
                            std::int64_t page_size) {
  Job job{spec, uniform_batch(1, tokens, tokens)};
  job.page_size = page_size;
  Options options;
  options.block_tokens = block;
  const auto backend = row.make_backend({1, kNoDevice});
  const auto kernel = row.make_kernel(job.spec, *backend);
  const RingJob ring = ring_job(job, options, *kernel, 1);
  const WorldPlans world(ring, options, Route::kDirect, 1);
  return reserved_limits(ring, options, world.layout(), world.plan(0)).prepared;
}

TEST(Capture, HasTheTablesOfAFewBlocksAndNeitherThoseOfManyNorOfPages) {
  const AttentionSpec specs[] = {make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0}),
                                 make_spec(Dtype::kBf16, 4, 1, 576, {-1, 0}, 512)};  // absorbed latents
  int rows = 0;
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    for (const AttentionSpec& spec : specs) {
      if (row.backend != "cuda" || !row.missing(spec).empty()) continue;
      SCOPED_TRACE(std::string(row.name) + ", " + describe(spec));
      ++rows;
      EXPECT_EQ(prepared_tasks(row, spec, 1500, 0, 0), 1);
      EXPECT_EQ(prepared_tasks(row, spec, 1500, 512, 0), 3);
      EXPECT_EQ(prepared_tasks(row, spec, 8192, 128, 0), 0);
      EXPECT_EQ(prepared_tasks(row, spec, 1500, 0, 64), 0);
    }
  }
  if (rows == 0) GTEST_SKIP() << "needs a build with kernels of a device";
}

}  // namespace
}  // namespace ringattn::testing
