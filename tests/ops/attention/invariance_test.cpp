// SPDX-License-Identifier: Apache-2.0
// The promise: O and LSE have the same bits for any number of ranks, layout, stripe, block size, route, order of
// delivery and number of threads, and whatever else is in the batch.
#include <gtest/gtest.h>

#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

struct Case {
  const char* name;
  Job job;

  friend std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name; }
};

AttentionSpec with_everything(AttentionSpec spec) {
  spec.softcap = 20.0F;
  spec.sinks = true;
  return spec;
}

std::vector<Case> cases() {
  const Mask causal{-1, 0};
  const Mask full{-1, -1};
  const Mask window{200, 0};
  const Mask both_sides{100, 150};
  const std::vector<Sequence> ragged = {{1, 1, 0},     {300, 300, 0}, {0, 0, 0},     {129, 129, 0}, {5, 700, 695},
                                        {257, 90, 11}, {64, 0, 0},    {900, 900, 0}, {17, 40, -9},  {128, 128, 0}};
  return {
      {"causal_bf16", {make_spec(Dtype::kBf16, 4, 2, 64, causal), uniform_batch(1, 1531, 1531)}},
      {"full_fp32", {make_spec(Dtype::kF32, 2, 1, 40, full, 24), uniform_batch(1, 777, 777)}},
      {"window_fp16", {make_spec(Dtype::kF16, 2, 2, 32, window), uniform_batch(1, 1200, 1200)}},
      {"both_sides_sinks",
       {with_everything(make_spec(Dtype::kBf16, 2, 1, 64, both_sides, 32)), uniform_batch(2, 700, 700)}},
      {"ragged_causal", {with_everything(make_spec(Dtype::kBf16, 2, 1, 32, causal)), ragged}},
      {"ragged_full", {make_spec(Dtype::kF32, 1, 1, 16, full), ragged}},
      {"cached_prefix", {make_spec(Dtype::kBf16, 2, 2, 32, causal), uniform_batch(1, 333, 1400)}},
      {"one_token", {make_spec(Dtype::kBf16, 2, 1, 32, causal), uniform_batch(1, 1, 1)}},
      {"one_query_many_keys", {make_spec(Dtype::kBf16, 2, 1, 32, causal), uniform_batch(1, 1, 3000)}},
  };
}

// Also where a GPU is: a world of one rank would take it, and host transports move nothing of its memory.
Options on_the_cpu() {
  Options options;
  options.kernel.backend = "cpu";
  return options;
}

class Invariance : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    job_ = GetParam().job;
    tensors_ = random_tensors(job_, 7);
    Options alone = on_the_cpu();
    alone.threads = 1;
    reference_ = run_job(job_, alone, tensors_, 1);
  }

  void expect_same(const Options& options, int world, const ThreadsDelivery& delivery, const std::string& what) {
    const JobResult result = run_job(job_, options, tensors_, world, delivery);
    EXPECT_TRUE(result.same_bits(reference_)) << GetParam().name << ": " << what;
  }

  Job job_;
  JobTensors tensors_;
  JobResult reference_;
};

TEST_P(Invariance, WorldsLayoutsAndBlocks) {
  for (const int world : {1, 2, 3, 4, 5, 7, 8}) {
    for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
      for (const std::int64_t block : {0, 128, 512, 1 << 20}) {
        Options options = on_the_cpu();
        options.threads = 1;
        options.layout.kind = kind;
        options.block_tokens = block;
        expect_same(
            options, world, {},
            std::string(layout_name(kind)) + ", world " + std::to_string(world) + ", block " + std::to_string(block));
      }
    }
  }
}

TEST_P(Invariance, StripesOfAnyLength) {
  for (const std::int64_t stripe : {1, 37, 100, 128, 200, 256, 640, 5000}) {
    for (const int world : {2, 3, 8}) {
      Options options = on_the_cpu();
      options.threads = 1;
      options.layout.stripe = stripe;
      options.block_tokens = 384;
      expect_same(options, world, {}, "stripe " + std::to_string(stripe) + ", world " + std::to_string(world));
    }
  }
}

TEST_P(Invariance, ShuffledAndDelayedDeliveryOnBothRoutes) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    for (const Route route : {Route::kDirect, Route::kChain}) {
      for (const int world : {3, 5, 16}) {
        Options options = on_the_cpu();
        options.threads = 1;
        options.block_tokens = 256;
        options.checksum = seed == 1;
        options.overlap = seed != 2;
        expect_same(options, world, {route, seed, std::chrono::microseconds(300)},
                    "seed " + std::to_string(seed) + ", world " + std::to_string(world));
      }
    }
  }
}

TEST_P(Invariance, AnyNumberOfThreads) {
  for (const int threads : {2, 3, 8}) {
    Options options = on_the_cpu();
    options.threads = threads;
    expect_same(options, 1, {}, std::to_string(threads) + " threads");
    expect_same(options, 2, {}, std::to_string(threads) + " threads, world 2");
  }
}

TEST_P(Invariance, SixtyFourRanks) {
  Options options = on_the_cpu();
  options.threads = 1;
  expect_same(options, 64, {}, "world 64");
}

INSTANTIATE_TEST_SUITE_P(Jobs, Invariance, ::testing::ValuesIn(cases()),
                         [](const ::testing::TestParamInfo<Case>& job) { return std::string(job.param.name); });

// A sequence's bits don't change with what it is packed with.
TEST(Batch, SequencesDoNotSeeTheirNeighbours) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 2, 1, 32, {-1, 0});
  const std::vector<std::int64_t> lengths = {130, 1, 517, 128, 64};
  Job packed{spec, {}};
  for (const std::int64_t n : lengths) packed.batch.sequences.push_back({n, n, 0});
  const JobTensors tensors = random_tensors(packed, 3);
  Options options = on_the_cpu();
  options.threads = 1;
  const JobResult together = run_job(packed, options, tensors, 4);

  const std::size_t q_row = 2 * 32 * 2;
  const std::size_t kv_row = 32 * 2;
  std::size_t begin = 0;
  for (const std::int64_t length : lengths) {
    const auto n = static_cast<std::size_t>(length);
    const auto cut = [&](const std::vector<std::byte>& all, std::size_t row) {
      return std::vector<std::byte>(all.begin() + static_cast<std::ptrdiff_t>(begin * row),
                                    all.begin() + static_cast<std::ptrdiff_t>((begin + n) * row));
    };
    const JobTensors alone{cut(tensors.q, q_row), cut(tensors.k, kv_row), cut(tensors.v, kv_row), {}};
    const JobResult single = run_job({spec, {{length, length, 0}}}, options, alone, 1);
    EXPECT_EQ(std::memcmp(single.out.data(), together.out.data() + begin * q_row, n * q_row), 0) << "length " << length;
    EXPECT_EQ(std::memcmp(single.lse.data(), together.lse.data() + begin * 2, n * 2 * sizeof(float)), 0);
    begin += n;
  }
}

// Prefill in chunks over the growing prefix equals whole prefill, for chunks of any length.
TEST(ChunkedPrefill, EqualsWholePrefill) {
  for (const Mask mask : {Mask{-1, 0}, Mask{150, 0}}) {
    const AttentionSpec spec = make_spec(Dtype::kBf16, 2, 1, 32, mask);
    const std::int64_t n = 1000;
    const Job whole{spec, {{n, n, 0}}};
    const JobTensors tensors = random_tensors(whole, 5);
    Options options = on_the_cpu();
    options.threads = 1;
    const JobResult reference = run_job(whole, options, tensors, 2);
    const std::size_t q_row = 2 * 32 * 2;
    const std::size_t kv_row = 32 * 2;
    for (const std::int64_t chunk : {1000, 333, 128, 77}) {
      for (std::int64_t begin = 0; begin < n; begin += chunk) {
        const std::int64_t end = std::min(n, begin + chunk);
        const auto cut = [](const std::vector<std::byte>& all, std::int64_t from, std::int64_t to, std::size_t row) {
          return std::vector<std::byte>(all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(from) * row),
                                        all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(to) * row));
        };
        const JobTensors part{
            cut(tensors.q, begin, end, q_row), cut(tensors.k, 0, end, kv_row), cut(tensors.v, 0, end, kv_row), {}};
        const JobResult result = run_job({spec, {{end - begin, end, begin}}}, options, part, 3);
        const auto at = static_cast<std::size_t>(begin);
        const auto rows = static_cast<std::size_t>(end - begin);
        ASSERT_EQ(std::memcmp(result.out.data(), reference.out.data() + at * q_row, rows * q_row), 0) << chunk;
        ASSERT_EQ(std::memcmp(result.lse.data(), reference.lse.data() + at * 2, rows * 2 * sizeof(float)), 0) << chunk;
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
