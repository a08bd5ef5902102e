// SPDX-License-Identifier: Apache-2.0
// A Scan on 1 to 8 ranks gives the bits of the kernel on all tokens, by memcmp of y and of final states.
#include "attention/scan.hpp"

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
#include "tests/support/error_of.hpp"
#include "tests/support/scan_rank.hpp"

namespace ringattn::testing {
namespace {

ScanOptions on_cpu() {
  ScanOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

class ScanWorld : public ::testing::TestWithParam<int> {
 protected:
  static int ranks() { return GetParam(); }
  static void in_world(const std::function<void(Transport&)>& rank_main, const ThreadsDelivery& delivery = {}) {
    if (ranks() > 1) {
      run_threads_world(ranks(), delivery, rank_main);
    } else {
      rank_main(*make_self_transport());
    }
  }

  static void expect_same(const ScanCase& given, const ScanOptions& options = on_cpu(),
                          const ThreadsDelivery& delivery = {}) {
    std::atomic<std::int64_t> differ = 0;
    std::atomic<std::int64_t> tokens = 0;
    in_world(
        [&](Transport& world) {
          Scan scan(job_of(given), world, options);
          ScanRank rank(scan, world.rank(), given);
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

TEST_P(ScanWorld, OneLongSequence) {
  static const ScanCase given = make_scan_case(small_scan(3, false), {5 * kSuper + 777}, true, 1);
  expect_same(given);
}

TEST_P(ScanWorld, SequencesThatEndOnAndInsideOfShards) {
  static const ScanCase given =
      make_scan_case(small_scan(2, false), {70'000, 1, 2 * kSuper, 100, kSuper + 64, 3, kSuper}, true, 2);
  expect_same(given);
  ScanOptions all_heads = on_cpu();
  all_heads.head_ranges = 1;
  expect_same(given, all_heads);
  expect_same(given, on_cpu(), {.shuffle_seed = 7, .max_delay = std::chrono::microseconds(300)});
}

TEST_P(ScanWorld, SelectiveScans) {
  static const ScanCase given = make_scan_case(small_scan(16, true), {3 * kSuper + 5, 40, kSuper + 1}, true, 3);
  expect_same(given);
}

TEST_P(ScanWorld, FewerSuperSegmentsThanRanks) {
  static const ScanCase given = make_scan_case(small_scan(2, false), {3000, 65}, false, 4);
  expect_same(given);
}

// At the beginning, between sequences of one rank and of two, and at the end. Their states pass through.
TEST_P(ScanWorld, EmptySequences) {
  static const std::vector<ScanCase> cases = [] {
    std::vector<ScanCase> made;
    for (const bool initial : {false, true}) {
      made.push_back(make_scan_case(small_scan(2, false), {0, 0, kSuper + 5, 0, 3, 0, 0, 64, 0}, initial, 6));
      made.push_back(make_scan_case(small_scan(16, true), {5, 0}, initial, 7));
      made.push_back(make_scan_case(small_scan(2, false), {0, 0, 0}, initial, 8));
    }
    return made;
  }();
  for (const ScanCase& given : cases) expect_same(given);
}

TEST_P(ScanWorld, EmptySequencesAndRunsOfTheCallers) {
  static const ScanCase given = make_scan_case(small_scan(2, false), {0, 70, 0, 0, 2 * kSuper + 1, 0}, true, 9);
  ScanOptions options = on_cpu();
  options.runs.emplace(static_cast<std::size_t>(ranks()));
  options.runs->back() = {{1, 0, 70}, {4, 0, kSuper}, {4, kSuper, 2 * kSuper}, {4, 2 * kSuper, 2 * kSuper + 1}};
  if (ranks() > 1) {
    (*options.runs)[0] = {{4, kSuper, 2 * kSuper}};
    options.runs->back().erase(options.runs->back().begin() + 2);
  }
  expect_same(given, options);
}

// One rank's super-segments need not be neighbours: states then go back and forth.
TEST_P(ScanWorld, RunsOfTheCallers) {
  static const ScanCase given = make_scan_case(small_scan(2, false), {4 * kSuper + 9, kSuper + 70}, true, 5);
  for (const bool backwards : {false, true}) {
    ScanOptions options = on_cpu();
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

TEST_P(ScanWorld, LayersThatAreEnqueued) {
  static const ScanCase given = make_scan_case(small_scan(2, false), {2 * kSuper + 100, 700}, true, 6);
  std::atomic<std::int64_t> differ = 0;
  in_world([&](Transport& world) {
    Scan scan(job_of(given), world, on_cpu());
    ScanRank first(scan, world.rank(), given);
    ScanRank second(scan, world.rank(), given);
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

INSTANTIATE_TEST_SUITE_P(Ranks, ScanWorld, ::testing::Values(1, 2, 3, 4, 5, 7, 8),
                         [](const auto& test) { return fmt::format("{}", test.param); });

void expect_message(const Error& error, ErrorCode code, const std::vector<std::string>& parts) {
  EXPECT_EQ(error.code(), code) << error.what();
  for (const std::string& part : parts) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\nlacks: " << part;
  }
}

TEST(ScanRefusals, JobsThatContradictThemselves) {
  const auto self = make_self_transport();
  const ScanJob good{small_scan(2, false), {100, 5}};
  const auto refused = [&](const std::function<void(ScanJob&, ScanOptions&)>& spoil, ErrorCode code,
                           const std::vector<std::string>& parts) {
    ScanJob job = good;
    ScanOptions options = on_cpu();
    spoil(job, options);
    expect_message(error_of([&] { Scan(job, *self, options); }), code, parts);
  };
  Scan(good, *self, on_cpu());
  refused([](ScanJob& job, ScanOptions&) { job.lengths.clear(); }, ErrorCode::kUsage, {"no sequences"});
  refused([](ScanJob& job, ScanOptions&) { job.lengths[1] = -1; }, ErrorCode::kUsage, {"sequence 1", "-1 tokens"});
  refused([](ScanJob& job, ScanOptions&) { job.spec.groups = 4; }, ErrorCode::kUsage, {"not a multiple"});
  refused([](ScanJob& job, ScanOptions&) { job.spec.head_dim = 12; }, ErrorCode::kUnsupported, {"head_dim 12"});
  refused([](ScanJob&, ScanOptions& options) { options.memory_budget = 1000; }, ErrorCode::kMemory, {"1000 bytes"});
  refused([](ScanJob&, ScanOptions& options) { options.head_ranges = 3; }, ErrorCode::kUsage, {"3 ranges of heads"});
  refused(
      [](ScanJob&, ScanOptions& options) {
        options.runs = {{{0, 0, 100}}, {{1, 0, 5}}};
      },
      ErrorCode::kUsage, {"runs of 2 ranks"});
  refused(
      [](ScanJob&, ScanOptions& options) {
        options.runs = {{{0, 0, 100}}};
      },
      ErrorCode::kUsage, {"token 0 of sequence 1 belongs to no rank"});
}

TEST(ScanRefusals, RunsThatCutASuperSegment) {
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    ScanOptions options = on_cpu();
    options.runs = {{{0, 0, 64}}, {{0, 64, 100}}};
    const Error error = error_of([&] { Scan({small_scan(2, false), {100}}, world, options); });
    expect_message(error, ErrorCode::kUsage, {"rank 1 begins at token 64 of sequence 0", "65536"});
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

// A rank that passes wrong tensors alone: all of them hear of it, and the object stays of use.
TEST(ScanRefusals, TensorsOfTheWrongShape) {
  const ScanCase given = make_scan_case(small_scan(2, false), {kSuper + 100, 30}, false, 8);
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    Scan scan(job_of(given), world, on_cpu());
    ScanRank rank(scan, world.rank(), given);
    ScanInputs wrong = rank.inputs();
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

TEST(ScanRefusals, UnlikeRanks) {
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    ScanJob job{small_scan(2, false), {100}};
    if (world.rank() == 1) job.spec.dt_most = 0.1F;
    EXPECT_EQ(error_of([&] { Scan(job, world, on_cpu()); }).code(), ErrorCode::kUnsupported);
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

}  // namespace
}  // namespace ringattn::testing
