// SPDX-License-Identifier: Apache-2.0
// Decoding over compressed caches by the front door: rows are appended step by step, on one rank and on several, and
// each step has the bits of a step over the plain cache which decompressing the compressed one gives.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "attention/decode.hpp"
#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "kernels/fold_spec.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kDim = 64;
constexpr std::int64_t kRowBytes = kKvHeads * kDim * 2;
const RowShape kShape{Dtype::kBf16, kKvHeads, kDim};

// What a step of `rows` rows gives when every sequence has `length` keys, by attention over the rows as they come back.
std::vector<std::byte> expected_step(CompressedTensor& k, CompressedTensor& v, const std::vector<std::byte>& q,
                                     int rows) {
  DecodeSpec spec;
  spec.fold = make_spec(Dtype::kBf16, kHeads, kKvHeads, kDim, {-1, 0});
  const std::vector<std::byte> plain_k = decompress_tensor(k, 1), plain_v = decompress_tensor(v, 1);
  const std::int64_t length = k.lengths[0];
  const auto sequences = static_cast<std::int64_t>(k.lengths.size());
  const auto choice = choose_kernel(spec, {"cpu", "auto"});
  const auto backend = choice.row->make_backend({1, kNoDevice});
  const auto kernel = choice.row->make_kernel(spec, *backend);
  kernel->reserve({sequences, rows, length});
  const std::vector<std::int32_t> lengths(static_cast<std::size_t>(sequences), static_cast<std::int32_t>(length));
  std::vector<std::byte> out(static_cast<std::size_t>(sequences * rows * kHeads * kDim) * 2);
  DecodeStep step;
  step.q = dense_view(static_cast<const void*>(q.data()), Dtype::kBf16, sequences * rows, kHeads, kDim);
  step.rows = rows;
  step.k = {plain_k.data(),           Dtype::kBf16,    sequences, length, kKvHeads, kDim,
            length * kKvHeads * kDim, kKvHeads * kDim, kDim};
  step.v = {plain_v.data(),           Dtype::kBf16,    sequences, length, kKvHeads, kDim,
            length * kKvHeads * kDim, kKvHeads * kDim, kDim};
  step.lengths = lengths.data();
  step.output.out = dense_view(static_cast<void*>(out.data()), Dtype::kBf16, sequences * rows, kHeads, kDim);
  kernel->enqueue(step, {});
  return out;
}

// The first `length` tokens of each of two sequences.
std::vector<std::byte> prefix(const std::vector<std::byte>& rows, std::int64_t tokens, std::int64_t length) {
  std::vector<std::byte> some;
  for (int s = 0; s < 2; ++s) {
    const auto* const from = rows.data() + s * tokens * kRowBytes;
    some.insert(some.end(), from, from + length * kRowBytes);
  }
  return some;
}

class CompressedDecode : public ::testing::TestWithParam<RowFormat> {};

TEST_P(CompressedDecode, StepsAreThoseOfPlainCaches) {
  constexpr std::int64_t kStart = 8150;  // groups of 8,192 keys: the steps cross into a second rank's
  constexpr int kSteps = 30;
  constexpr int kRows = 3;
  constexpr std::int64_t kTokens = kStart + kSteps * kRows;
  const RowFormat& format = GetParam();
  const std::vector<std::int64_t> all(2, kTokens);
  const std::vector<std::byte> k_rows = outlier_rows(kShape, all, 1), v_rows = outlier_rows(kShape, all, 2);
  const std::vector<std::byte> q = outlier_rows({Dtype::kBf16, kHeads, kDim}, std::vector<std::int64_t>{2 * kRows}, 3);
  const auto compressed = [&](const std::vector<std::byte>& rows, std::int64_t length, const CompressedTensor* tables) {
    const std::vector<std::byte> some = prefix(rows, kTokens, length);
    const std::vector<std::int64_t> lengths(2, length);
    if (tables == nullptr) {
      return compress_tensor("k", format, view_of(some, kShape, 2 * length), lengths, {7, 2}, ErrorCode::kUsage);
    }
    CompressedTensor tensor = make_compressed(format, kShape, lengths);
    if (codes_by_token(format)) tensor.tables = tables->tables;
    const std::vector<CompressedRun> runs = tensor.runs();
    compress_on_host({format, kShape, view_of(some, kShape, 2 * length), {}, runs, tensor.rows()}, 2);
    return tensor;
  };
  const CompressedTensor first_k = compressed(k_rows, kStart, nullptr);
  const CompressedTensor first_v = compressed(v_rows, kStart, nullptr);
  DecodeJob job;
  job.spec = make_spec(Dtype::kBf16, kHeads, kKvHeads, kDim, {-1, 0});
  job.limits = {2, kRows, kTokens};
  job.page_size = 64;
  job.format = {format, format};

  // Around 8,192 keys, where every group of tokens closes, and at the end.
  std::map<int, std::vector<std::byte>> expected;
  for (const int i : {0, 13, 14, kSteps - 1}) {
    const std::int64_t length = kStart + (i + 1) * kRows;
    CompressedTensor k = compressed(k_rows, length, &first_k), v = compressed(v_rows, length, &first_v);
    expected[i] = expected_step(k, v, q, kRows);
  }
  for (const int world : {1, 2, 3}) {
    std::vector<std::vector<std::byte>> steps(kSteps, std::vector<std::byte>(2 * kRows * kHeads * kDim * 2));
    const auto rank = [&](Transport& transport) {
      DecodeOptions options;
      options.kernel.backend = "cpu";
      options.threads = 1;
      Decode decode(job, transport, options);
      const std::vector<std::int64_t> held(2, decode.cache_tokens(kTokens));
      const PageOrder order = shuffled_pages(held, 64, static_cast<std::uint64_t>(transport.rank()) + 1);
      CompressedPool k(format, kShape, order, 2), v(format, kShape, order, 2);
      k.fill(first_k, decode.share(), decode.group_keys());
      v.fill(first_v, decode.share(), decode.group_keys());
      std::vector<std::int32_t> lengths(2, kStart);
      for (int i = 0; i < kSteps; ++i) {
        const auto fresh = [&](const std::vector<std::byte>& rows) {
          std::vector<std::byte> some;
          for (int s = 0; s < 2; ++s) {
            const auto* const from = rows.data() + (s * kTokens + kStart + i * kRows) * kRowBytes;
            some.insert(some.end(), from, from + kRows * kRowBytes);
          }
          return some;
        };
        const std::vector<std::byte> k_new = fresh(k_rows), v_new = fresh(v_rows);
        const SequenceRange mine = decode.owned(2);
        DecodeInputs inputs;
        inputs.q = dense_view(static_cast<const void*>(q.data()), Dtype::kBf16, 2 * kRows, kHeads, kDim);
        inputs.rows = kRows;
        inputs.block_table = order.view();
        inputs.table_pages = order.columns;
        inputs.lengths = lengths.data();
        inputs.grow = true;
        inputs.k_new = view_of(k_new, kShape, 2 * kRows);
        inputs.v_new = view_of(v_new, kShape, 2 * kRows);
        inputs.packed_k = k.view();
        inputs.packed_v = v.view();
        DecodeOutputs outputs;
        outputs.out = dense_view(
            static_cast<void*>(steps[static_cast<std::size_t>(i)].data() + mine.first * kRows * kHeads * kDim * 2),
            Dtype::kBf16, mine.count * kRows, kHeads, kDim);
        decode.run(inputs, outputs);
      }
    };
    if (world == 1) {
      rank(*make_self_transport());
    } else {
      run_threads_world(world, {}, rank);
    }
    for (const auto& [i, out] : expected) {
      EXPECT_TRUE(steps[static_cast<std::size_t>(i)] == out) << "world " << world << ", step " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CompressedDecode,
                         ::testing::Values(parse_row_format("fp8 head"), parse_row_format("fp8 token_head"),
                                           parse_row_format("int8"), parse_row_format("int4_channel group 32"),
                                           parse_row_format("int4_channel group 64"),
                                           parse_row_format("int4_token group 32"), parse_row_format("vector width 4")),
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
    inputs.lengths = length.data();
    inputs.grow = true;
    inputs.k_new = view_of(k_new, kShape, 2);
    inputs.v_new = view_of(v_new, kShape, 2);
    inputs.packed_k = k.view();
    inputs.packed_v = v.view();
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
  inputs.packed_k = other.view();
  inputs.packed_v = v.view();
  DecodeOutputs outputs;
  outputs.out = dense_view(static_cast<void*>(results.data()), Dtype::kBf16, 1, kHeads, kDim);
  const std::string text = error_of([&] { decode.run(inputs, outputs); }).what();
  EXPECT_EQ(text.find("the cache of k is fp8 token_head of bf16 [1, 100, 2, 64] (the job's is int8 of bf16"), 0U)
      << text;
}

}  // namespace
}  // namespace ringattn::testing
