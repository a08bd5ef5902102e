// SPDX-License-Identifier: Apache-2.0
// An Ssm whose ranks share GPUs has the bits of the kernel on all tokens, by memcmp of y and of final states: states
// are sent between device memories, and layers are enqueued consecutively.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <tuple>
#include <vector>

#include "base/gpu.hpp"
#include "comm/world.hpp"
#include "ops/ssm/loaded_ssm.hpp"
#include "ops/ssm/ssm_accuracy.hpp"
#include "tests/support/ssm_rank.hpp"
#include "tests/support/two_ranks.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kSuper = kSuperSegmentTokens;

// One rank's part of an Ssm, run on its own and enqueued twice, in one range of heads or two: adds up rows and states
// that differ, and its tokens.
void scan_rank(Transport& world, const SsmCase& given, int ranges, std::atomic<std::int64_t>& differ,
               std::atomic<std::int64_t>& tokens) {
  SsmOptions options;
  options.kernel.backend = "cuda";
  options.head_ranges = ranges;
  Ssm scan(job_of(given), world, options);
  EXPECT_EQ(scan.kernel().row->backend, "cuda");
  SsmRank first(scan, world.rank(), given);
  SsmRank second(scan, world.rank(), given);
  scan.run(first.inputs(), first.outputs());
  differ += first.differences();
  first.clear();
  scan.enqueue(first.inputs(), first.outputs());
  scan.enqueue(second.inputs(), second.outputs());
  scan.wait();
  differ += first.differences() + second.differences();
  tokens += scan.layout().tokens(world.rank());
}

SsmCase heads_of_matrices() {
  SsmSpec spec = small_ssm(6, false);
  spec.head_dim = 64;
  spec.state_dim = 128;
  return make_ssm_case(spec, {2 * kSuper + 777, 100, kSuper}, true, 1, "cuda");
}
SsmCase ragged_sequences() {
  return make_ssm_case(small_ssm(2, false), {0, 70'000, 1, 2 * kSuper, 0, 0, 100, kSuper + 64, 3, kSuper, 0}, true, 2,
                       "cuda");
}
// Linear attention with a decay per key dim.
SsmCase key_dims() {
  SsmSpec spec;
  spec.heads = spec.groups = 2;
  spec.decay = SsmDecay::kDim;
  spec.scale = 0.0884F;
  return make_ssm_case(spec, {2 * kSuper + 777, 100, kSuper}, true, 4, "cuda");
}
SsmCase channels() { return make_ssm_case(small_ssm(16, true), {3 * kSuper + 5, 40, kSuper + 1}, true, 3, "cuda"); }

class GpuSsm : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  }

  static void expect_same(const SsmCase& given) {
    WorldRequest request;
    request.memory = WantedMemory::kDevice;
    request.ranks = GetParam();
    for (const int ranges : {1, 2}) {
      std::string failure;
      std::atomic<std::int64_t> differ = 0;
      std::atomic<std::int64_t> tokens = 0;
      run_world(
          request,
          [&](Transport& world) {
            scan_rank(world, given, ranges, differ, tokens);
            return 0;
          },
          [&](const Error& error) { failure = error.what(); });
      EXPECT_EQ(failure, "") << ranges << " ranges";
      EXPECT_EQ(differ, 0) << ranges << " ranges";
      EXPECT_EQ(tokens, given.inputs.rows());
    }
  }
};

TEST_P(GpuSsm, HeadsOfMatrices) { expect_same(heads_of_matrices()); }

TEST_P(GpuSsm, SequencesThatEndOnAndInsideOfShards) { expect_same(ragged_sequences()); }

TEST_P(GpuSsm, KeyDims) { expect_same(key_dims()); }

TEST_P(GpuSsm, Channels) { expect_same(channels()); }

// A layer with a convolution in front, or a decode step.
SsmInput layer(bool selective, bool step) {
  SyntheticSsmInput scan;
  scan.seed = 7;
  scan.selective = selective;
  scan.update = step;
  scan.tokens = step ? 1 : kSuper + 777;
  scan.batch = step ? 9 : 1;
  scan.heads = selective ? 64 : 6;
  scan.state_dim = selective ? 16 : 128;
  scan.conv_width = 4;
  return SsmInput(scan, {}).with_final_states();
}

// The digests of the layer on that many ranks. `checked`: of the one rank, rows are compared with fp64, too.
SsmDigests digests_of(const SsmInput& input, int ranks, const std::string& transport = "auto", bool checked = false) {
  WorldRequest request;
  request.transport = transport;
  request.memory = WantedMemory::kDevice;
  request.ranks = ranks;
  std::string failure;
  SsmDigests digests;
  run_world(
      request,
      [&](Transport& world) {
        SsmOptions options;
        options.kernel.backend = "cuda";
        PreparedSsm prepared(input, world, options);
        const Collective collective(world, Timeouts(60.0));
        const SsmRankResult result = prepared.compute();
        if (checked) {
          const SsmAccuracy accuracy = check_ssm_result(collective, input, 16, result.result_view(input.job()),
                                                        rounds_factors(*prepared.ssm().kernel().row), 4);
          EXPECT_TRUE(accuracy.passes()) << accuracy.part << ", " << accuracy.misplaced << " misplaced";
        }
        const SsmDigests all = digest_ssm(input, result, collective);
        if (world.rank() == 0) digests = all;
        return 0;
      },
      [&](const Error& error) { failure = error.what(); });
  EXPECT_EQ(failure, "") << ranks << " ranks, " << transport;
  return digests;
}

// On one rank right by fp64, on others with its digests.
TEST_P(GpuSsm, LayersAndStepsOfDecoding) {
  for (const bool selective : {false, true}) {
    for (const bool step : {false, true}) {
      const SsmInput input = layer(selective, step);
      const SsmDigests one = digests_of(input, 1, "auto", GetParam() == 1);
      const SsmDigests several = digests_of(input, GetParam());
      EXPECT_EQ(several.y, one.y) << "selective " << selective << ", step " << step;
      EXPECT_EQ(several.final_states, one.final_states);
    }
  }
}

// Halos are sent on the caller's stream and states on one of the SSM op's own, over one transport.
void expect_the_same_of_two_ranks(const std::string& transport) {
  for (const SsmCase& given : {heads_of_matrices(), ragged_sequences(), channels()}) {
    for (const int ranges : {1, 2}) {
      std::atomic<std::int64_t> differ = 0;
      std::atomic<std::int64_t> tokens = 0;
      in_two_ranks(transport, [&](Transport& world) {
        EXPECT_EQ(world.name(), transport);
        scan_rank(world, given, ranges, differ, tokens);
      });
      EXPECT_EQ(differ, 0) << transport << ", " << ranges << " ranges";
      EXPECT_EQ(tokens, given.inputs.rows());
    }
  }
  for (const bool selective : {false, true}) {
    const SsmInput input = layer(selective, false);
    const SsmDigests one = digests_of(input, 1);
    const SsmDigests two = digests_of(input, 2, transport);
    EXPECT_EQ(two.y, one.y) << transport << ", selective " << selective;
    EXPECT_EQ(two.final_states, one.final_states) << transport << ", selective " << selective;
  }
}

TEST(GpuSsmOfTwoRanks, HasTheBitsOfOneByP2p) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  expect_the_same_of_two_ranks("p2p");
}

TEST(GpuSsmOfTwoRanks, HasTheBitsOfOneByNccl) {
  if (visible_gpus().size() < 2) GTEST_SKIP() << "needs two GPUs: NCCL takes one for each rank";
  expect_the_same_of_two_ranks("nccl");
}

// By the marks of two streams. Few heads and tokens, so that compute-sanitizer can follow states from rank to rank.
TEST(GpuSsmOfTwoRanks, ReportsItsPhasesInOrder) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  const SsmCase given = make_ssm_case(small_ssm(2, false), {kSuper + 100}, true, 4, "cuda");
  std::atomic<std::int64_t> differ = 0;
  in_two_ranks("p2p", [&](Transport& world) {
    SsmOptions options;
    options.kernel.backend = "cuda";
    options.head_ranges = 1;
    options.timeline = true;
    Ssm scan(job_of(given), world, options);
    SsmRank rank(scan, world.rank(), given);
    const SsmStats stats = scan.run(rank.inputs(), rank.outputs());
    differ += rank.differences();
    using enum SsmPhase::Kind;
    ASSERT_EQ(stats.parts.size(), 4U);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(stats.parts[i].kind, (std::vector{kSegmentState, kTransfer, kWait, kOutput})[i]) << i;
      EXPECT_EQ(stats.parts[i].heads.count, 2) << i;
    }
    // Seconds are those of fp32 milliseconds, which two differences round differently.
    const auto follows = [](double later, double earlier) { return later >= earlier - 1e-6; };
    const auto& [fold, travel, wait, finish] = std::tie(stats.parts[0], stats.parts[1], stats.parts[2], stats.parts[3]);
    for (const SsmPhase& part : stats.parts) EXPECT_TRUE(follows(part.end, part.begin));
    EXPECT_TRUE(follows(fold.begin, 0.0));
    EXPECT_TRUE(follows(travel.begin, fold.end)) << travel.begin << " and " << fold.end;
    EXPECT_TRUE(follows(wait.begin, fold.end)) << wait.begin << " and " << fold.end;
    EXPECT_TRUE(follows(wait.end, travel.end)) << wait.end << " and " << travel.end;
    EXPECT_TRUE(follows(finish.begin, wait.end)) << finish.begin << " and " << wait.end;
    EXPECT_TRUE(follows(stats.seconds, finish.end)) << stats.seconds << " and " << finish.end;
    EXPECT_TRUE(follows(stats.exposed_comm_seconds, wait.end - wait.begin));
  });
  EXPECT_EQ(differ, 0);
}

// States have a stream of their own: nothing of an SSM layer begins before earlier work on the caller's stream has
// finished, and later work on it finds all of the layer done.
TEST(GpuSsmOfTwoRanks, IsPartOfTheCallersStream) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  const SsmCase given = heads_of_matrices();
  std::atomic<std::int64_t> differ = 0;
  in_two_ranks("p2p", [&](Transport& world) {
    SsmOptions options;
    options.kernel.backend = "cuda";
    options.head_ranges = 2;
    Ssm scan(job_of(given), world, options);
    Backend& backend = scan.backend();
    const Stream stream = backend.stream();
    SsmRank rank(scan, world.rank(), given);
    const SsmInputs inputs = rank.inputs();
    const TensorView& x = inputs.x;
    const auto bytes =
        static_cast<std::int64_t>(x.tokens * x.token_stride * static_cast<std::int64_t>(size_of(x.dtype)));
    // x arrives late, and y is copied off at once.
    const Buffer kept = backend.allocate(static_cast<std::size_t>(bytes));
    const Buffer copy = backend.allocate(static_cast<std::size_t>(bytes));
    constexpr std::int64_t kBusyBytes = std::int64_t{64} << 20;
    const Buffer busy = backend.allocate(2 * kBusyBytes);
    auto* const late = static_cast<std::byte*>(const_cast<void*>(x.data));
    backend.copy_rows(kept.data(), bytes, late, bytes, bytes, 1, stream);
    backend.fill_bytes(late, std::byte{0xff}, static_cast<std::size_t>(bytes), stream);
    backend.synchronize(stream, Deadline::after(60.0), {});
    for (int i = 0; i < 50; ++i) {
      backend.copy_rows(busy.data() + kBusyBytes, kBusyBytes, busy.data(), kBusyBytes, kBusyBytes, 1, stream);
    }
    backend.copy_rows(late, bytes, kept.data(), bytes, bytes, 1, stream);
    scan.enqueue(inputs, rank.outputs(), stream);
    backend.copy_rows(copy.data(), bytes, rank.outputs().y.data, bytes, bytes, 1, stream);
    backend.fill_bytes(rank.outputs().y.data, std::byte{0xff}, static_cast<std::size_t>(bytes), stream);
    backend.copy_rows(rank.outputs().y.data, bytes, copy.data(), bytes, bytes, 1, stream);
    scan.wait();
    backend.synchronize(stream, Deadline::after(60.0), {});
    differ += rank.differences();
  });
  EXPECT_EQ(differ, 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuSsm, ::testing::Values(1, 2, 3),
                         [](const auto& test) { return fmt::format("{}", test.param); });

}  // namespace
}  // namespace ringattn::testing
