// SPDX-License-Identifier: Apache-2.0
// Decoding over compressed caches by the op class: rows are appended step by step, on one rank and on several, and
// each step has the bits of a step over the plain cache which decompressing the compressed one gives.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "ops/decode/decode.hpp"
#include "tests/support/compressed_steps.hpp"
#include "tests/support/environment.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kDim = 64;
constexpr std::int64_t kRowBytes = kKvHeads * kDim * 2;
const RowShape kShape{Dtype::kBf16, kKvHeads, kDim};

class CompressedDecode : public ::testing::TestWithParam<RowFormat> {};

TEST_P(CompressedDecode, StepsAreThoseOfPlainCaches) {
  constexpr int kSteps = 18;
  const CompressedSteps cache(make_spec(Dtype::kBf16, kHeads, kKvHeads, kDim, {-1, 0}), {GetParam(), GetParam()},
                              kSteps);
  DecodeOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  // Around 8,192 keys, where every quantization group is complete, and at the end.
  std::map<int, std::vector<std::byte>> expected;
  for (const int step : {0, 5, 6, kSteps - 1}) expected[step] = cache.expected(step, options.kernel);
  const std::string name = test_name(GetParam());
  CaseChoice choice(2, std::accumulate(name.begin(), name.end(), std::int64_t{0}));
  for (const int world : {1, 2, 3, 5}) {
    if (!choice.take()) continue;
    CompressedSteps::Outputs steps = cache.no_outputs();
    const auto rank = [&](Transport& transport) { cache.run(transport, options, steps); };
    if (world == 1) {
      rank(*make_self_transport());
    } else {
      run_threads_world(world, {}, rank);
    }
    for (const auto& [step, out] : expected) {
      EXPECT_TRUE(steps[static_cast<std::size_t>(step)] == out) << "world " << world << ", step " << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CompressedDecode,
                         ::testing::Values(parse_row_format("fp8 tensor"), parse_row_format("fp8 head"),
                                           parse_row_format("fp8 token_head"), parse_row_format("int8"),
                                           parse_row_format("int4_channel group 32"),
                                           parse_row_format("int4_channel group 64"),
                                           parse_row_format("int4_token group 32"), parse_row_format("vector width 2"),
                                           parse_row_format("vector width 4"), parse_row_format("vector width 8")),
                         [](const auto& test) { return test_name(test.param); });

TEST(CompressedDecodeRefusals, NewRowsThatAreNotFiniteAreNamed) {
  const auto transport = make_self_transport();
  DecodeJob job;
  job.spec = make_spec(Dtype::kBf16, kHeads, kKvHeads, kDim, {-1, 0});
  job.limits = {1, 2, 100};
  job.format = {parse_row_format("int8"), parse_row_format("int4_channel group 32")};
  DecodeOptions options;
  options.kernel.backend = "cpu";
  Decode decode(job, *transport, options);
  const PageOrder order{{}, 0, 1, 100};
  CompressedPool k(job.format.k, kShape, order, 1), v(job.format.v, kShape, order, 1);
  const std::vector<std::byte> q = outlier_rows({Dtype::kBf16, kHeads, kDim}, std::vector<std::int64_t>{2}, 3);
  std::vector<std::byte> good = outlier_rows(kShape, std::vector<std::int64_t>{2}, 4), bad = good, out(q.size());
  store_element(bad.data() + kRowBytes + (kDim + 9) * 2, Dtype::kBf16, std::numeric_limits<float>::infinity());
  std::vector<std::int32_t> length{0};
  const auto step = [&](const std::vector<std::byte>& k_new, const std::vector<std::byte>& v_new) {
    DecodeInputs inputs;
    inputs.q = dense_view(static_cast<const void*>(q.data()), Dtype::kBf16, 2, kHeads, kDim);
    inputs.rows = 2;
    inputs.lengths_before = length.data();
    inputs.update_lengths = true;
    inputs.k_new = view_of(k_new, kShape, 2);
    inputs.v_new = view_of(v_new, kShape, 2);
    inputs.quantized_k = k.view();
    inputs.quantized_v = v.view();
    DecodeOutputs outputs;
    outputs.out = dense_view(static_cast<void*>(out.data()), Dtype::kBf16, 2, kHeads, kDim);
    decode.enqueue(inputs, outputs);
  };
  step(good, good);
  EXPECT_NO_THROW(decode.wait());
  step(bad, good);
  EXPECT_NE(std::string(error_of([&] { decode.wait(); }).what()).find("k_new[1, 1, 9] is inf"), std::string::npos);
  step(good, bad);
  EXPECT_NE(std::string(error_of([&] { decode.wait(); }).what()).find("v_new[1, 1, 9] is inf"), std::string::npos);
  EXPECT_NO_THROW(decode.wait());
}

TEST(CompressedDecodeRefusals, OtherCachesThanTheJobs) {
  const auto transport = make_self_transport();
  DecodeJob job;
  job.spec = make_spec(Dtype::kBf16, kHeads, kKvHeads, kDim, {-1, 0});
  job.limits = {1, 1, 100};
  job.format.k = parse_row_format("low_rank rank 8");
  EXPECT_EQ(error_of([&] { Decode(job, *transport, {}); }).code(), ErrorCode::kUnsupported);
  job.format = {parse_row_format("int8"), parse_row_format("int8")};
  job.values_in_keys = true;
  EXPECT_NE(
      std::string(error_of([&] { Decode(job, *transport, {}); }).what()).find("values in keys that are stored as int8"),
      std::string::npos);
  job.values_in_keys = false;
  DecodeOptions options;
  options.kernel.backend = "cpu";
  Decode decode(job, *transport, options);
  const std::vector<std::int64_t> lengths{100};
  const PageOrder order{{}, 0, 1, 100};
  CompressedPool other(parse_row_format("fp8 token_head"), kShape, order, 1), v(job.format.v, kShape, order, 1);
  std::vector<std::byte> rows(kHeads * kDim * 2), results(rows.size());
  std::vector<std::int32_t> length{1};
  DecodeInputs inputs;
  inputs.q = dense_view(static_cast<const void*>(rows.data()), Dtype::kBf16, 1, kHeads, kDim);
  inputs.lengths = length.data();
  inputs.quantized_k = other.view();
  inputs.quantized_v = v.view();
  DecodeOutputs outputs;
  outputs.out = dense_view(static_cast<void*>(results.data()), Dtype::kBf16, 1, kHeads, kDim);
  const std::string text = error_of([&] { decode.run(inputs, outputs); }).what();
  EXPECT_EQ(text.find("the cache of k is fp8 token_head of bf16 [1, 100, 2, 64] (the job's is int8 of bf16"), 0U)
      << text;
}

}  // namespace
}  // namespace ringattn::testing
