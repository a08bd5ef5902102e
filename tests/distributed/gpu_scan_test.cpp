// SPDX-License-Identifier: Apache-2.0
// A Scan whose ranks share GPUs has the bits of the kernel on all tokens, by memcmp of y and of final states: states
// travel between device memories, and layers are enqueued one behind the other.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "attention/check/scan_accuracy.hpp"
#include "attention/job/scan_file_job.hpp"
#include "base/gpu.hpp"
#include "comm/world.hpp"
#include "tests/support/scan_rank.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kSuper = kSuperSegmentTokens;

class GpuScan : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  }

  static void expect_same(const ScanCase& given) {
    WorldRequest request;
    request.memory = WantedMemory::kDevice;
    request.ranks = GetParam();
    std::string failure;
    std::atomic<std::int64_t> differ = 0;
    std::atomic<std::int64_t> tokens = 0;
    run_world(
        request,
        [&](Transport& world) {
          ScanOptions options;
          options.kernel.backend = "cuda";
          Scan scan(job_of(given), world, options);
          EXPECT_EQ(scan.kernel().row->backend, "cuda");
          ScanRank first(scan, world.rank(), given);
          ScanRank second(scan, world.rank(), given);
          scan.run(first.inputs(), first.outputs());
          differ += first.differences();
          first.clear();
          scan.enqueue(first.inputs(), first.outputs());
          scan.enqueue(second.inputs(), second.outputs());
          scan.wait();
          differ += first.differences() + second.differences();
          tokens += scan.layout().tokens(world.rank());
          return 0;
        },
        [&](const Error& error) { failure = error.what(); });
    EXPECT_EQ(failure, "");
    EXPECT_EQ(differ, 0);
    EXPECT_EQ(tokens, given.inputs.rows());
  }
};

TEST_P(GpuScan, HeadsOfMatrices) {
  ScanSpec spec = small_scan(6, false);
  spec.head_dim = 64;
  spec.state_dim = 128;
  expect_same(make_scan_case(spec, {2 * kSuper + 777, 100, kSuper}, true, 1, "cuda"));
}

TEST_P(GpuScan, SequencesThatEndOnAndInsideOfShards) {
  expect_same(
      make_scan_case(small_scan(2, false), {70'000, 1, 2 * kSuper, 100, kSuper + 64, 3, kSuper}, true, 2, "cuda"));
}

TEST_P(GpuScan, Channels) {
  expect_same(make_scan_case(small_scan(16, true), {3 * kSuper + 5, 40, kSuper + 1}, true, 3, "cuda"));
}

// Layers with a convolution in front, and steps of decoding: on one rank right by fp64, on others with its digests.
TEST_P(GpuScan, LayersAndStepsOfDecoding) {
  for (const bool selective : {false, true}) {
    for (const bool step : {false, true}) {
      SyntheticScan scan;
      scan.seed = 7;
      scan.selective = selective;
      scan.update = step;
      scan.tokens = step ? 1 : kSuper + 777;
      scan.batch = step ? 9 : 1;
      scan.heads = selective ? 64 : 6;
      scan.state_dim = selective ? 16 : 128;
      scan.conv_width = 4;
      const ScanInput input = ScanInput(scan, {}).with_final_states();
      std::vector<ScanDigests> digests;
      for (const int ranks : {1, GetParam()}) {
        WorldRequest request;
        request.memory = WantedMemory::kDevice;
        request.ranks = ranks;
        std::string failure;
        run_world(
            request,
            [&](Transport& world) {
              ScanOptions options;
              options.kernel.backend = "cuda";
              PreparedScan prepared(input, world, options);
              const ScanFileResult result = prepared.run();
              if (GetParam() == 1) {
                const Meeting meeting(world, Patience(60.0));
                const ScanAccuracy accuracy =
                    check_scan_result(meeting, input, 16, result.rank.runs, result.rank.y_view(input.job().spec), 4);
                EXPECT_TRUE(accuracy.passes()) << accuracy.part << ", " << accuracy.misplaced << " misplaced";
              }
              if (world.rank() == 0) digests.push_back(result.digests);
              return 0;
            },
            [&](const Error& error) { failure = error.what(); });
        EXPECT_EQ(failure, "");
      }
      ASSERT_EQ(digests.size(), 2U);
      EXPECT_EQ(digests[0].y, digests[1].y) << "selective " << selective << ", step " << step;
      EXPECT_EQ(digests[0].final_states, digests[1].final_states);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuScan, ::testing::Values(1, 2, 3),
                         [](const auto& test) { return fmt::format("{}", test.param); });

}  // namespace
}  // namespace ringattn::testing
