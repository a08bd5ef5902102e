// SPDX-License-Identifier: Apache-2.0
// What a step is planned to need and to read, by kernels of the test's own.
#include "ops/decode/decode_plan_summary.hpp"

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
  std::int64_t partial_floats() const override { return 4; }
  void merge(const DecodeMerge&, Stream) override {}
};

TEST(DecodePlanSummaries, AskTheKernelWhatIsTooMuch) {
  const auto step = [](std::int64_t batch) {
    SyntheticInput input;
    input.op = Op::kDecode;
    input.tokens = 100;
    input.batch = batch;
    return JobInput(input, {});
  };
  EXPECT_EQ(summarize_decode_plan(step(3), FewSharesKernel(), 2).keys.size(), 2U);
  const auto refusal = [&step](std::int64_t batch, int ranks) {
    return testing::error_of([&] { summarize_decode_plan(step(batch), FewSharesKernel(), ranks); }).code();
  };
  EXPECT_EQ(refusal(3, 3), ErrorCode::kUnsupported);
  EXPECT_EQ(refusal(4, 2), ErrorCode::kUnsupported);
}

// A kernel that computes shared prefixes once, with tiles of 16 keys and KV splits of at most 1,024.
class SharingKernel final : public DecodeKernel {
 public:
  explicit SharingKernel(bool shares, int tiles_per_kv_split = 64)
      : shares_(shares), group_tiles_(tiles_per_kv_split) {}

  int key_tile() const override { return 16; }
  int tiles_per_kv_split() const override { return group_tiles_; }
  std::size_t scratch_bytes(const DecodeLimits&) const override { return 0; }
  bool shares_prefixes() const override { return shares_; }
  void reserve(const DecodeLimits&) override {}
  void enqueue(const DecodeStep&, Stream) override {}
  std::int64_t partial_floats() const override { return 4; }
  void merge(const DecodeMerge&, Stream) override {}

 private:
  bool shares_;
  int group_tiles_;
};

// Four sequences of 5,000 keys, of which the step reads this many.
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
  return summarize_decode_plan(JobInput(input, numerics), kernel, ranks).bytes_read / (2 * 2 * 64);
}

TEST(DecodePlanSummaries, CountTilesOfSharedPrefixesOnce) {
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
  // Rows that don't see the whole prefix don't share its computation.
  const Mask window{4500, 0};
  EXPECT_EQ(keys_read(shares, 3000, window), keys_read(reads_all, 3000, window));
}

// A kernel says how many tiles its KV splits have, and ranks deal these splits.
TEST(DecodePlanSummaries, DealTheKernelsKvSplits) {
  const auto summary = [](int tiles_per_kv_split, int ranks, std::int64_t page_size) {
    SyntheticInput input;
    input.op = Op::kDecode;
    input.tokens = 5000;
    input.batch = 2;
    input.page_size = page_size;
    return summarize_decode_plan(JobInput(input, {}), SharingKernel(false, tiles_per_kv_split), ranks);
  };
  for (const std::int64_t page_size : {0, 16, 256}) {
    const DecodePlanSummary long_splits = summary(64, 3, page_size), short_splits = summary(16, 3, page_size);
    EXPECT_EQ(long_splits.kv_split_keys, 1024);
    EXPECT_EQ(long_splits.kv_splits, 5);
    EXPECT_EQ(long_splits.keys, (std::vector<std::int64_t>{2 * 2048, 2 * 1928, 2 * 1024}));
    EXPECT_EQ(short_splits.kv_split_keys, 256);
    EXPECT_EQ(short_splits.kv_splits, 20);
    // Groups 0, 3, … 18; 1, 4, … 19, of which the last has 136 keys; 2, 5, … 17.
    EXPECT_EQ(short_splits.keys, (std::vector<std::int64_t>{2 * 7 * 256, 2 * (6 * 256 + 136), 2 * 6 * 256}));
    EXPECT_EQ(short_splits.memory.partials * 2, long_splits.memory.partials * 7) << "7 groups instead of 2";
    EXPECT_EQ(short_splits.job.pages * page_size, page_size > 0 ? 2 * 7 * 256 : 0);
  }
  // More ranks than KV splits of 1,024 keys, but not of 256.
  EXPECT_EQ(summary(64, 7, 0).idle(), 2);
  EXPECT_EQ(summary(16, 7, 0).idle(), 0);
  // Rows that see whole KV splits of a prefix, but not all of it, share these splits' tiles.
  const Mask window{4500, 0};
  EXPECT_EQ(keys_read(SharingKernel(true, 16), 3000, window), keys_read(SharingKernel(false, 16), 3000, window));
}

// With a block mask, ranks keep heads or sequences, and exchange only results.
TEST(DecodePlanSummaries, OfBlockMasks) {
  const auto summary = [](std::int64_t batch, int ranks) {
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
    numerics.block_mask = "window:1k+global:128";
    return summarize_decode_plan(JobInput(input, numerics), SharingKernel(false), ranks);
  };
  const DecodePlanSummary one = summary(1, 1);
  EXPECT_EQ(one.deal, DecodeDeal());
  const DecodePlanSummary heads = summary(1, 2);
  EXPECT_EQ(heads.deal, (DecodeDeal{1, 2, 1}));
  EXPECT_EQ(heads.kv_heads, (std::vector<int>{2, 2}));
  EXPECT_EQ(heads.keys, (std::vector<std::int64_t>{5000, 5000}));
  EXPECT_EQ(heads.rows, (std::vector<std::int64_t>{0, 2}));
  // Two rows of 8 heads: 64 numbers of 2 bytes, and LSE.
  EXPECT_EQ(heads.received, (std::vector<std::int64_t>{0, 2 * 8 * (2 * 64 + 4)}));
  EXPECT_EQ(heads.balance(), 1.0);
  EXPECT_EQ(heads.attended[0] + heads.attended[1], one.attended[0]);
  EXPECT_EQ(2 * heads.memory.cache, one.memory.cache);
  EXPECT_EQ(heads.memory.partials, 4U * 8 * (2 * 64 + 4));
  const DecodePlanSummary sequences = summary(4, 4);
  EXPECT_EQ(sequences.deal, (DecodeDeal{4, 1, 1}));
  EXPECT_EQ(sequences.bytes_moved(), 0);
  EXPECT_EQ(sequences.memory.partials, 0U);
  const DecodePlanSummary many = summary(1, 16);
  EXPECT_EQ(many.deal, (DecodeDeal{4, 4, 1}));
  EXPECT_EQ(many.idle(), 12);
  EXPECT_EQ(many.balance(), 4.0);
}

}  // namespace
}  // namespace ringattn
