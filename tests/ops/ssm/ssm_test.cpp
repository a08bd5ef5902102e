// SPDX-License-Identifier: Apache-2.0
// An Ssm on 1 to 8 ranks gives the bits of the kernel on all tokens, by memcmp of y and of final states.
#include "ops/ssm/ssm.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "kernels/rope/rope_frequencies.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/ssm_rank.hpp"

namespace ringattn::testing {
namespace {

SsmOptions on_cpu() {
  SsmOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

class SsmWorld : public ::testing::TestWithParam<int> {
 protected:
  static int ranks() { return GetParam(); }
  static void in_world(const std::function<void(Transport&)>& rank_main, const ThreadsDelivery& delivery = {}) {
    if (ranks() > 1) {
      run_threads_world(ranks(), delivery, rank_main);
    } else {
      rank_main(*make_self_transport());
    }
  }

  static void expect_same(const SsmCase& given, const SsmOptions& options = on_cpu(),
                          const ThreadsDelivery& delivery = {}) {
    std::atomic<std::int64_t> differ = 0;
    std::atomic<std::int64_t> tokens = 0;
    in_world(
        [&](Transport& world) {
          Ssm scan(job_of(given), world, options);
          SsmRank rank(scan, world.rank(), given);
          scan.run(rank.inputs(), rank.outputs());
          differ += rank.differences();
          tokens += scan.layout().tokens(world.rank());
        },
        delivery);
    EXPECT_EQ(differ, 0);
    EXPECT_EQ(tokens, given.inputs.rows());
  }
};

constexpr std::int64_t kSuper = kSuperSegmentTokens;

TEST_P(SsmWorld, OneLongSequence) {
  static const SsmCase given = make_ssm_case(small_ssm(3, false), {5 * kSuper + 777}, true, 1);
  expect_same(given);
}

TEST_P(SsmWorld, SequencesThatEndOnAndInsideOfShards) {
  static const SsmCase given =
      make_ssm_case(small_ssm(2, false), {70'000, 1, 2 * kSuper, 100, kSuper + 64, 3, kSuper}, true, 2);
  expect_same(given);
  SsmOptions all_heads = on_cpu();
  all_heads.head_ranges = 1;
  expect_same(given, all_heads, {.shuffle_seed = 7, .max_delay = std::chrono::microseconds(300)});
}

TEST_P(SsmWorld, SelectiveScans) {
  static const SsmCase given = make_ssm_case(small_ssm(16, true), {3 * kSuper + 5, 40, kSuper + 1}, true, 3);
  expect_same(given);
}

// No gate, skip connection, bias of dt or rates; log-decays are fp32 rows of their own width.
TEST_P(SsmWorld, DecaysOfKeyDims) {
  static const SsmCase given = [] {
    SsmSpec spec;
    spec.dtype = Dtype::kBf16;
    spec.heads = spec.groups = 2;
    spec.head_dim = spec.state_dim = 8;
    spec.decay = SsmDecay::kDim;
    return make_ssm_case(spec, {2 * kSuper + 77, 5, kSuper}, true, 10);
  }();
  expect_same(given);
}

// Positions count from 0 in their sequences, wherever their tokens lie.
TEST_P(SsmWorld, RotatedQueriesAndKeys) {
  static const std::vector<SsmCase> cases = [] {
    std::vector<SsmCase> made;
    for (const RopePairs pairs : {RopePairs::kHalfSplit, RopePairs::kInterleaved}) {
      SsmSpec spec;
      spec.dtype = Dtype::kBf16;
      spec.heads = spec.groups = 2;
      spec.head_dim = spec.state_dim = 8;
      spec.decay = pairs == RopePairs::kHalfSplit ? SsmDecay::kHead : SsmDecay::kDim;
      RopeParameters parameters;
      parameters.partial_rotary_factor = 0.75;
      const RopeSpec rope = make_rope_spec(parameters, spec.dtype, spec.state_dim, pairs, /*exact=*/false);
      made.push_back(make_ssm_case(spec, {kSuper + 100, 0, 70, 2 * kSuper + 1}, true, 11, "cpu", rope));
    }
    return made;
  }();
  for (const SsmCase& given : cases) expect_same(given);
}

TEST_P(SsmWorld, FewerSuperSegmentsThanRanks) {
  static const SsmCase given = make_ssm_case(small_ssm(2, false), {3000, 65}, false, 4);
  expect_same(given);
}

// At the beginning, between sequences of one rank and of two, and at the end. Their states pass through.
TEST_P(SsmWorld, EmptySequences) {
  static const std::vector<SsmCase> cases = [] {
    std::vector<SsmCase> made;
    for (const bool initial : {false, true}) {
      made.push_back(make_ssm_case(small_ssm(2, false), {0, 0, kSuper + 5, 0, 3, 0, 0, 64, 0}, initial, 6));
      made.push_back(make_ssm_case(small_ssm(16, true), {5, 0}, initial, 7));
      made.push_back(make_ssm_case(small_ssm(2, false), {0, 0, 0}, initial, 8));
    }
    return made;
  }();
  for (const SsmCase& given : cases) expect_same(given);
}

TEST_P(SsmWorld, EmptySequencesAndRunsOfTheCallers) {
  static const SsmCase given = make_ssm_case(small_ssm(2, false), {0, 70, 0, 0, 2 * kSuper + 1, 0}, true, 9);
  SsmOptions options = on_cpu();
  options.runs.emplace(static_cast<std::size_t>(ranks()));
  options.runs->back() = {{1, 0, 70}, {4, 0, kSuper}, {4, kSuper, 2 * kSuper}, {4, 2 * kSuper, 2 * kSuper + 1}};
  if (ranks() > 1) {
    (*options.runs)[0] = {{4, kSuper, 2 * kSuper}};
    options.runs->back().erase(options.runs->back().begin() + 2);
  }
  expect_same(given, options);
}

// One rank's super-segments need not be neighbours: states then go back and forth.
TEST_P(SsmWorld, RunsOfTheCallers) {
  static const SsmCase given = make_ssm_case(small_ssm(2, false), {4 * kSuper + 9, kSuper + 70}, true, 5);
  for (const bool backwards : {false, true}) {
    SsmOptions options = on_cpu();
    options.runs.emplace(static_cast<std::size_t>(ranks()));
    int next = 0;
    for (std::size_t s = 0; s < given.inputs.lengths.size(); ++s) {
      for (std::int64_t begin = 0; begin < given.inputs.lengths[s]; begin += kSuper) {
        const int rank = backwards ? ranks() - 1 - next % ranks() : next % ranks();
        (*options.runs)[static_cast<std::size_t>(rank)].push_back(
            {static_cast<std::int32_t>(s), begin, std::min(given.inputs.lengths[s], begin + kSuper)});
        ++next;
      }
    }
    expect_same(given, options);
  }
}

TEST_P(SsmWorld, LayersThatAreEnqueued) {
  static const SsmCase given = make_ssm_case(small_ssm(2, false), {2 * kSuper + 100, 700}, true, 6);
  std::atomic<std::int64_t> differ = 0;
  in_world([&](Transport& world) {
    Ssm scan(job_of(given), world, on_cpu());
    SsmRank first(scan, world.rank(), given);
    SsmRank second(scan, world.rank(), given);
    for (int round = 0; round < 2; ++round) {
      scan.enqueue(first.inputs(), first.outputs());
      scan.enqueue(second.inputs(), second.outputs());
      scan.wait();
      differ += first.differences() + second.differences();
      first.clear();
      second.clear();
    }
    scan.wait();  // for nothing
  });
  EXPECT_EQ(differ, 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, SsmWorld, ::testing::Values(1, 2, 3, 4, 5, 7, 8),
                         [](const auto& test) { return fmt::format("{}", test.param); });

void expect_message(const Error& error, ErrorCode code, const std::vector<std::string>& parts) {
  EXPECT_EQ(error.code(), code) << error.what();
  for (const std::string& part : parts) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\nlacks: " << part;
  }
}

TEST(SsmRefusals, JobsThatContradictThemselves) {
  const auto self = make_self_transport();
  const SsmJob good{small_ssm(2, false), {100, 5}};
  const auto refused = [&](const std::function<void(SsmJob&, SsmOptions&)>& spoil, ErrorCode code,
                           const std::vector<std::string>& parts) {
    SsmJob job = good;
    SsmOptions options = on_cpu();
    spoil(job, options);
    expect_message(error_of([&] { Ssm(job, *self, options); }), code, parts);
  };
  Ssm(good, *self, on_cpu());
  refused([](SsmJob& job, SsmOptions&) { job.lengths.clear(); }, ErrorCode::kUsage, {"no sequences"});
  refused([](SsmJob& job, SsmOptions&) { job.lengths[1] = -1; }, ErrorCode::kUsage, {"sequence 1", "-1 tokens"});
  refused([](SsmJob& job, SsmOptions&) { job.spec.groups = 4; }, ErrorCode::kUsage, {"not a multiple"});
  refused([](SsmJob& job, SsmOptions&) { job.spec.head_dim = 12; }, ErrorCode::kUnsupported, {"head_dim 12"});
  refused([](SsmJob&, SsmOptions& options) { options.memory_budget = 1000; }, ErrorCode::kMemory, {"1000 bytes"});
  refused([](SsmJob&, SsmOptions& options) { options.head_ranges = 3; }, ErrorCode::kUsage, {"3 ranges of heads"});
  refused(
      [](SsmJob&, SsmOptions& options) {
        options.runs = {{{0, 0, 100}}, {{1, 0, 5}}};
      },
      ErrorCode::kUsage, {"runs of 2 ranks"});
  refused(
      [](SsmJob&, SsmOptions& options) {
        options.runs = {{{0, 0, 100}}};
      },
      ErrorCode::kUsage, {"token 0 of sequence 1 belongs to no rank"});
}

TEST(SsmRefusals, RunsThatCutASuperSegment) {
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    SsmOptions options = on_cpu();
    options.runs = {{{0, 0, 64}}, {{0, 64, 100}}};
    const Error error = error_of([&] { Ssm({small_ssm(2, false), {100}}, world, options); });
    expect_message(error, ErrorCode::kUsage, {"rank 1 begins at token 64 of sequence 0", "65536"});
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

// Only one rank passes wrong tensors: all ranks throw, and the object stays usable.
TEST(SsmRefusals, TensorsOfTheWrongShape) {
  const SsmCase given = make_ssm_case(small_ssm(2, false), {kSuper + 100, 30}, false, 8);
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    Ssm scan(job_of(given), world, on_cpu());
    SsmRank rank(scan, world.rank(), given);
    SsmInputs wrong = rank.inputs();
    if (world.rank() == 1) wrong.b.heads = 2;
    expect_message(error_of([&] { scan.run(wrong, rank.outputs()); }), ErrorCode::kUsage, {"B is bf16 [", "rank 1"});
    wrong = rank.inputs();
    if (world.rank() == 0) wrong.d = nullptr;
    expect_message(error_of([&] { scan.run(wrong, rank.outputs()); }), ErrorCode::kUsage, {"D is missing"});
    scan.run(rank.inputs(), rank.outputs());
    EXPECT_EQ(rank.differences(), 0);
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

TEST(SsmRefusals, UnlikeRanks) {
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    SsmJob job{small_ssm(2, false), {100}};
    if (world.rank() == 1) job.spec.dt_max = 0.1F;
    EXPECT_EQ(error_of([&] { Ssm(job, world, on_cpu()); }).code(), ErrorCode::kUnsupported);
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

// States of both jobs have the same size, so that one job would take the other's.
TEST(SsmRefusals, RanksThatRunDifferentJobs) {
  const SsmCase few = make_ssm_case(small_ssm(2, false), {kSuper + 5}, false, 12);
  const SsmCase many = make_ssm_case(small_ssm(2, false), {kSuper + 70}, false, 13);
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    Ssm first(job_of(few), world, on_cpu());
    Ssm second(job_of(many), world, on_cpu());
    SsmRank of_first(first, world.rank(), few);
    SsmRank of_second(second, world.rank(), many);
    expect_message(error_of([&] {
                     world.rank() == 0 ? first.run(of_first.inputs(), of_first.outputs())
                                       : second.run(of_second.inputs(), of_second.outputs());
                   }),
                   ErrorCode::kUsage, {"rank 1 and rank 0 run different jobs", "65541 tokens", "65606 tokens"});
    first.run(of_first.inputs(), of_first.outputs());
    EXPECT_EQ(of_first.differences(), 0);
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

}  // namespace
}  // namespace ringattn::testing
