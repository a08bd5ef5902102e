// SPDX-License-Identifier: Apache-2.0
// What figures samples give, how many are taken, and in which order. Real times are not asserted: a machine may be
// busy.
#include "ops/jobs/samples.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

constexpr double kMaxWait = 30.0;

TEST(Samples, QuantilesLieBetweenThem) {
  const SampleTimes times = summarise({5, 1, 3, 2, 4, 6, 7, 8, 9, 10, 11});
  EXPECT_EQ(times.median, 6.0);
  EXPECT_DOUBLE_EQ(times.p10, 2.0);
  EXPECT_DOUBLE_EQ(times.p90, 10.0);
  EXPECT_EQ(summarise({1, 2}).median, 1.5);
  EXPECT_EQ(summarise({7}).p90, 7.0);
  EXPECT_EQ(summarise({}).median, 0.0);
}

TEST(Samples, RatesAreByTheMedian) {
  EXPECT_DOUBLE_EQ((SampleTimes{4.0, 1.0, 8.0}).per_second(12.0), 3000.0);
  EXPECT_EQ(SampleTimes().per_second(12.0), 0.0);
}

TEST(Samples, AreAsManyAsAskedForOrAsTheFigureNeeds) {
  EXPECT_EQ(sample_count({.count = 3}, 1e-6), 3);
  EXPECT_EQ(sample_count({}, 7.0), 10);
  EXPECT_EQ(sample_count({}, 0.01), 50);
  EXPECT_EQ(sample_count({}, 0.0), 10'000);
}

TEST(Samples, TakeTurnsAndTheSlowestRankCounts) {
  constexpr int kRanks = 3;
  constexpr std::int64_t kCount = 5;
  run_threads_world(kRanks, {}, [&](Transport& world) {
    const Collective collective(world, Timeouts(kMaxWait));
    std::vector<std::size_t> order;
    std::vector<std::int64_t> progress;
    const SampleRequest request{kCount, [&](std::string_view what, const StepCount& steps) {
                                  EXPECT_EQ(what, "sample");
                                  EXPECT_EQ(steps.all, kCount);
                                  progress.push_back(steps.done);
                                }};
    // In sample i rank i % 3 takes i + 1 seconds and the others none; the second kind takes ten times as long, of which
    // it waits a half.
    const auto run = [&](std::size_t kind) {
      const auto sample = static_cast<std::int64_t>(order.size()) / 2;
      order.push_back(kind);
      const double seconds = sample % kRanks == world.rank() ? static_cast<double>(sample + 1) : 0.0;
      return kind == 0 ? RunTimes{seconds} : RunTimes{10.0 * seconds, 5.0 * seconds};
    };
    const std::vector<Samples> samples = take_samples(collective, request, 1.0, 2, run);
    ASSERT_EQ(samples.size(), 2U);
    EXPECT_EQ(samples[0].count, kCount);
    EXPECT_DOUBLE_EQ(samples[0].ms.median, 3e3);
    EXPECT_EQ(samples[0].exposed_comm_ms, 0.0);
    EXPECT_DOUBLE_EQ(samples[1].ms.median, 30e3);
    EXPECT_DOUBLE_EQ(samples[1].ms.p90, 46e3);
    EXPECT_DOUBLE_EQ(samples[1].exposed_comm_ms, 15e3);
    EXPECT_EQ(order, (std::vector<std::size_t>{0, 1, 0, 1, 0, 1, 0, 1, 0, 1}));
    EXPECT_EQ(progress, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5}));
  });
}

// One rank's time decides for all how many there are.
TEST(Samples, AreAsManyOnAllRanks) {
  run_threads_world(2, {}, [](Transport& world) {
    const Collective collective(world, Timeouts(kMaxWait));
    const double seconds = world.rank() == 0 ? 1e-3 : 0.025;
    const auto run = [&](std::size_t) { return RunTimes{seconds}; };
    EXPECT_EQ(take_samples(collective, {}, seconds, 1, run).front().count, 20);
  });
}

TEST(Samples, OfStepsGoFarBeyondADevicesCache) {
  const DecodeSample host = decode_sample(MemoryKind::kHost, 1);
  EXPECT_EQ(host.caches, 1);
  EXPECT_EQ(host.steps, 1);
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1} << 10, std::size_t{100} << 20, std::size_t{1} << 40}) {
    const DecodeSample device = decode_sample(MemoryKind::kDevice, bytes);
    EXPECT_GE(device.caches, 1);
    EXPECT_LE(device.caches, 256);
    EXPECT_GE(device.steps, std::max(4, device.caches)) << bytes;
  }
  EXPECT_EQ(decode_sample(MemoryKind::kDevice, std::size_t{100} << 20).caches, 5);
}

TEST(Samples, OfALoadedJob) {
  const Job job{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), uniform_batch(1, 300, 300)};
  const auto self = make_self_transport();
  const Collective collective(*self, Timeouts(kMaxWait));
  Options options;
  options.kernel.backend = "cpu";
  Attention attention(job, *self, options);
  LoadedJob loaded(JobInput::synthetic(job, 1), attention, collective);
  const RunMode modes[] = {RunMode::kWhole, RunMode::kComputeOnly};
  const std::vector<Samples> samples = sample_runs(
      collective, {.count = 2}, [&](RunMode mode) { return loaded.run(mode); }, modes);
  ASSERT_EQ(samples.size(), 2U);
  for (const Samples& of : samples) {
    EXPECT_EQ(of.count, 2);
    EXPECT_GT(of.ms.median, 0.0);
  }
}

}  // namespace
}  // namespace ringattn::testing
