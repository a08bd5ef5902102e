// SPDX-License-Identifier: Apache-2.0
// Overlap is real: with a link as slow as the computation, waiting for blocks stays a small part of the job. A timing,
// so only in the long suite, on an otherwise idle machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "comm/paced.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

// Exposed share of the slowest rank, in a world of two threads over a link of `bytes_per_second`.
double exposed_share(const Job& job, const Options& options, const JobTensors& tensors, double bytes_per_second) {
  JobResult result = poisoned_result(job, 2);
  auto world = make_threads_world(2);
  for (auto& transport : world) transport = make_paced_transport(std::move(transport), bytes_per_second);
  run_ranks(world, [&](Transport& transport) { run_rank(job, options, tensors, transport, result); });
  double worst = 0.0;
  for (const RunStats& stats : result.stats) worst = std::max(worst, stats.exposed_seconds / stats.seconds);
  return worst;
}

TEST(Overlap, ExposedWaitingIsSmallOnALinkAsSlowAsTheComputation) {
  if (std::getenv("RINGATTN_TEST_LONG") == nullptr)
    GTEST_SKIP() << "skipped: needs RINGATTN_TEST_LONG and an idle machine";
  FoldSpec spec;
  spec.heads = 8;
  spec.kv_heads = 2;
  spec.mask = {-1, -1};
  spec.softmax_scale = 0.09F;
  const Job job{spec, uniform_sequences(1, 8192, 8192)};
  const JobTensors tensors = random_tensors(job, 1);
  Options options;
  options.threads = 1;
  options.block_tokens = 256;

  const JobResult fast = run_job(job, options, tensors, 2);
  const double fold_seconds = fast.stats[0].seconds;
  const double bytes = static_cast<double>(job.k_tokens()) / 2 * static_cast<double>(kv_token_bytes(spec));
  EXPECT_LE(exposed_share(job, options, tensors, bytes / fold_seconds), 0.05);
  options.overlap = false;
  EXPECT_GE(exposed_share(job, options, tensors, bytes / fold_seconds), 0.3) << "the link was slow enough to see";
}

}  // namespace
}  // namespace ringattn::testing
