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
#include "kernels/rope/rope_frequencies.hpp"
#include "ops/decode/decode.hpp"
#include "ops/rope/rope.hpp"
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

// Steps that rotate keys quantize what a Rope would have stored in the input's dtype: caches, tails and O are equal.
TEST(CompressedDecodeWithRope, QuantizesRoundedKeys) {
  constexpr int kTokens = 40, kRows = 2;
  const auto transport = make_self_transport();
  const RopeSpec rope = make_rope_spec({}, Dtype::kBf16, kDim, RopePairs::kHalfSplit, false);
  DecodeOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  const std::vector<std::int64_t> tokens{kTokens};
  const RowShape q_shape{Dtype::kBf16, kHeads, kDim};
  const std::vector<std::byte> q = outlier_rows(q_shape, tokens, 5), k = outlier_rows(kShape, tokens, 6),
                               v = outlier_rows(kShape, tokens, 7);
  std::vector<std::byte> rotated_q = q, rotated_k = k;
  const auto in_place = [&](std::vector<std::byte>& rows, int heads) {
    const auto view = dense_view(static_cast<void*>(rows.data()), Dtype::kBf16, kTokens, heads, kDim);
    return RopeTensor{view, view};
  };
  const RopeTensor both[] = {in_place(rotated_q, kHeads), in_place(rotated_k, kKvHeads)};
  Rope(rope, {}).run({{}, both});
  for (const char* const format : {"fp8 token_head", "int8", "int4_channel group 32", "int4_token group 32"}) {
    std::vector<CompressedPool> pools;
    std::vector<std::byte> outs[2];
    for (const bool rotates : {false, true}) {
      DecodeJob job;
      job.spec = make_spec(Dtype::kBf16, kHeads, kKvHeads, kDim, {-1, 0});
      job.limits = {1, kRows, kTokens};
      job.format = {parse_row_format(format), parse_row_format("int8")};
      if (rotates) job.rope = rope;
      Decode decode(job, *transport, options);
      const PageOrder order{{}, 0, 1, kTokens};
      CompressedPool& keys = pools.emplace_back(job.format.k, kShape, order, 1);
      CompressedPool values(job.format.v, kShape, order, 1);
      std::vector<std::int32_t> length{0};
      std::vector<std::byte> out(q.size());
      for (int step = 0; step < kTokens; step += kRows) {
        const auto rows = [&](const std::vector<std::byte>& of, const RowShape& shape) {
          TensorView view = view_of(of, shape, kTokens);
          view.data = view.at(step, 0);
          view.tokens = kRows;
          return view;
        };
        DecodeInputs inputs;
        inputs.q = rows(rotates ? q : rotated_q, q_shape);
        inputs.rows = kRows;
        inputs.lengths_before = length.data();
        inputs.update_lengths = true;
        inputs.k_new = rows(rotates ? k : rotated_k, kShape);
        inputs.v_new = rows(v, kShape);
        inputs.quantized_k = keys.view();
        inputs.quantized_v = values.view();
        DecodeOutputs outputs;
        outputs.out = dense_view(static_cast<void*>(out.data()), Dtype::kBf16, kTokens, kHeads, kDim);
        outputs.out.data = outputs.out.at(step, 0);
        outputs.out.tokens = kRows;
        decode.run(inputs, outputs);
      }
      outs[rotates ? 1 : 0] = out;
    }
    EXPECT_TRUE(pools[0].same_bytes(pools[1])) << format;
    EXPECT_TRUE(outs[0] == outs[1]) << format;
  }
}

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
