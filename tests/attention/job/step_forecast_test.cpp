// SPDX-License-Identifier: Apache-2.0
// What a step is planned to need and to read, by kernels of the test's own.
#include "attention/job/step_forecast.hpp"

#include <gtest/gtest.h>

#include <cstdint>

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

// Whether a kernel folds shared prefixes once, with tiles of 16 keys and groups of 1,024.
class SharingKernel final : public DecodeKernel {
 public:
  explicit SharingKernel(bool shares) : shares_(shares) {}

  int key_tile() const override { return 16; }
  std::size_t scratch_bytes(const DecodeLimits&) const override { return 0; }
  bool shares_prefixes() const override { return shares_; }
  void reserve(const DecodeLimits&) override {}
  void enqueue(const DecodeStep&, Stream) override {}
  std::int64_t record_floats() const override { return 4; }
  void merge(const DecodeMerge&, Stream) override {}

 private:
  bool shares_;
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

}  // namespace
}  // namespace ringattn
