// SPDX-License-Identifier: Apache-2.0
// What a step is planned to need and to read, by kernels of the test's own.
#include "attention/job/step_forecast.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "base/error.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
namespace {

// What a kernel doesn't do is known when a step is planned, before anything is reserved or merged.
class FewSharesKernel final : public DecodeKernel {
 public:
  int key_tile() const override { return 64; }
  std::size_t scratch_bytes(const DecodeLimits&) const override { return 0; }
  void check(const DecodeLimits& limits, int shares) const override {
    if (shares > 2 || limits.sequences > 3) fail(ErrorCode::kUnsupported, "too many");
  }
  void reserve(const DecodeLimits&) override {}
  void enqueue(const DecodeStep&, Stream) override {}
  std::int64_t record_floats() const override { return 4; }
  void merge(const DecodeMerge&, Stream) override {}
};

TEST(StepForecasts, AskTheKernelWhatIsTooMuch) {
  const auto step = [](std::int64_t batch) {
    SyntheticInput input;
    input.op = Op::kDecode;
    input.tokens = 100;
    input.batch = batch;
    return JobInput(input, {});
  };
  EXPECT_EQ(forecast_step(step(3), FewSharesKernel(), 2).keys.size(), 2U);
  const auto refusal = [&step](std::int64_t batch, int ranks) {
    return testing::error_of([&] { forecast_step(step(batch), FewSharesKernel(), ranks); }).code();
  };
  EXPECT_EQ(refusal(3, 3), ErrorCode::kUnsupported);
  EXPECT_EQ(refusal(4, 2), ErrorCode::kUnsupported);
}

// Whether a kernel folds shared prefixes once, with tiles of 16 keys and groups of 1,024 or fewer.
class SharingKernel final : public DecodeKernel {
 public:
  explicit SharingKernel(bool shares, int group_tiles = 64) : shares_(shares), group_tiles_(group_tiles) {}

  int key_tile() const override { return 16; }
  int group_tiles() const override { return group_tiles_; }
  std::size_t scratch_bytes(const DecodeLimits&) const override { return 0; }
  bool shares_prefixes() const override { return shares_; }
  void reserve(const DecodeLimits&) override {}
  void enqueue(const DecodeStep&, Stream) override {}
  std::int64_t record_floats() const override { return 4; }
  void merge(const DecodeMerge&, Stream) override {}

 private:
  bool shares_;
  int group_tiles_;
};

// Four sequences of 5,000 keys, of which the step reads so many.
double keys_read(const DecodeKernel& kernel, std::int64_t prefix, const Mask& mask = {-1, 0}, int ranks = 1) {
  SyntheticInput input;
  input.op = Op::kDecode;
  input.tokens = 5000;
  input.q_len = 2;
  input.batch = 4;
  input.page_size = 16;
  input.prefix = prefix;
  Numerics numerics;
  numerics.mask = mask;
  return forecast_step(JobInput(input, numerics), kernel, ranks).bytes_read / (2 * 2 * 64);
}

TEST(StepForecasts, CountTilesOfSharedPrefixesOnce) {
  const SharingKernel shares(true), reads_all(false);
  constexpr double kAll = 4 * 5000;
  for (const int ranks : {1, 3}) {
    EXPECT_EQ(keys_read(shares, 0, {-1, 0}, ranks), kAll);
    EXPECT_EQ(keys_read(shares, 15, {-1, 0}, ranks), kAll) << "no whole page";
    EXPECT_EQ(keys_read(shares, 1000, {-1, 0}, ranks), kAll - 3 * 992);
    EXPECT_EQ(keys_read(shares, 3000, {-1, 0}, ranks), kAll - 3 * 2992);
    EXPECT_EQ(keys_read(shares, 4992, {-1, 0}, ranks), kAll - 3 * 4992);
    EXPECT_EQ(keys_read(reads_all, 3000, {-1, 0}, ranks), kAll);
  }
  // Rows that don't see the whole prefix fold all of it by themselves.
  const Mask window{4500, 0};
  EXPECT_EQ(keys_read(shares, 3000, window), keys_read(reads_all, 3000, window));
}

// A kernel says how many tiles its groups have, and ranks deal these groups.
TEST(StepForecasts, DealTheKernelsGroups) {
  const auto forecast = [](int group_tiles, int ranks, std::int64_t page_size) {
    SyntheticInput input;
    input.op = Op::kDecode;
    input.tokens = 5000;
    input.batch = 2;
    input.page_size = page_size;
    return forecast_step(JobInput(input, {}), SharingKernel(false, group_tiles), ranks);
  };
  for (const std::int64_t page_size : {0, 16, 256}) {
    const StepForecast long_groups = forecast(64, 3, page_size), short_groups = forecast(16, 3, page_size);
    EXPECT_EQ(long_groups.group_keys, 1024);
    EXPECT_EQ(long_groups.groups, 5);
    EXPECT_EQ(long_groups.keys, (std::vector<std::int64_t>{2 * 2048, 2 * 1928, 2 * 1024}));
    EXPECT_EQ(short_groups.group_keys, 256);
    EXPECT_EQ(short_groups.groups, 20);
    // Groups 0, 3, … 18; 1, 4, … 19, of which the last has 136 keys; 2, 5, … 17.
    EXPECT_EQ(short_groups.keys, (std::vector<std::int64_t>{2 * 7 * 256, 2 * (6 * 256 + 136), 2 * 6 * 256}));
    EXPECT_EQ(short_groups.memory.partials * 2, long_groups.memory.partials * 7) << "7 groups instead of 2";
    EXPECT_EQ(short_groups.job.pages * page_size, page_size > 0 ? 2 * 7 * 256 : 0);
  }
  // More ranks than groups of 1,024 keys, but not of 256.
  EXPECT_EQ(forecast(64, 7, 0).idle(), 2);
  EXPECT_EQ(forecast(16, 7, 0).idle(), 0);
  // Rows that see whole groups of a prefix, but not all of it, share these groups' tiles.
  const Mask window{4500, 0};
  EXPECT_EQ(keys_read(SharingKernel(true, 16), 3000, window), keys_read(SharingKernel(false, 16), 3000, window));
}

// By lists ranks keep heads or sequences, and give each other results alone.
TEST(StepForecasts, OfLists) {
  const auto forecast = [](std::int64_t batch, int ranks) {
    SyntheticInput input;
    input.op = Op::kDecode;
    input.seed = 1;
    input.tokens = 5000;
    input.q_len = 2;
    input.batch = batch;
    input.heads = 16;
    input.kv_heads = 4;
    input.head_dim = 64;
    Numerics numerics;
    numerics.lists = "window:1k+global:128";
    return forecast_step(JobInput(input, numerics), SharingKernel(false), ranks);
  };
  const StepForecast one = forecast(1, 1);
  EXPECT_EQ(one.deal, StepDeal());
  const StepForecast heads = forecast(1, 2);
  EXPECT_EQ(heads.deal, (StepDeal{1, 2, 1}));
  EXPECT_EQ(heads.kv_heads, (std::vector<int>{2, 2}));
  EXPECT_EQ(heads.keys, (std::vector<std::int64_t>{5000, 5000}));
  EXPECT_EQ(heads.rows, (std::vector<std::int64_t>{0, 2}));
  // Two rows of 8 heads: 64 numbers of 2 bytes, and LSE.
  EXPECT_EQ(heads.received, (std::vector<std::int64_t>{0, 2 * 8 * (2 * 64 + 4)}));
  EXPECT_EQ(heads.balance(), 1.0);
  EXPECT_EQ(heads.folded[0] + heads.folded[1], one.folded[0]);
  EXPECT_EQ(2 * heads.memory.cache, one.memory.cache);
  EXPECT_EQ(heads.memory.partials, 4U * 8 * (2 * 64 + 4));
  const StepForecast sequences = forecast(4, 4);
  EXPECT_EQ(sequences.deal, (StepDeal{4, 1, 1}));
  EXPECT_EQ(sequences.bytes_moved(), 0);
  EXPECT_EQ(sequences.memory.partials, 0U);
  const StepForecast many = forecast(1, 16);
  EXPECT_EQ(many.deal, (StepDeal{4, 4, 1}));
  EXPECT_EQ(many.idle(), 12);
  EXPECT_EQ(many.balance(), 4.0);
}

}  // namespace
}  // namespace ringattn
