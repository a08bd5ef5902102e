// SPDX-License-Identifier: Apache-2.0
// Results don't depend on the order in which a task's work is computed, or on what runs next to it. Consecutive query
// tiles of many heads, of any lengths, with or without keys.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "tests/kernels/attention/cuda_attention_fixture.hpp"
#include "tests/kernels/attention/cuda_sequence.hpp"
#include "tests/support/accuracy.hpp"

namespace ringattn::testing {
namespace {

class CudaOrderTest : public CudaAttentionTest {};

// One sequence whose tokens repeat those of a short one: quickly made.
AttentionInputs repeated_inputs(const AttentionSpec& spec, const SequenceShape& shape, std::uint64_t seed) {
  constexpr std::int64_t kDifferent = 1009;
  AttentionInputs inputs = random_inputs(spec, {{kDifferent, kDifferent, 0}}, seed);
  const auto repeat = [](std::vector<std::byte>& tensor, std::int64_t tokens) {
    const std::vector<std::byte> different = tensor;
    const std::size_t bytes = different.size() / kDifferent * static_cast<std::size_t>(tokens);
    tensor.resize(bytes);
    for (std::size_t at = 0; at < bytes; at += different.size()) {
      std::copy_n(different.begin(), std::min(different.size(), bytes - at),
                  tensor.begin() + static_cast<std::ptrdiff_t>(at));
    }
  };
  repeat(inputs.q, shape.q_len);
  repeat(inputs.k, shape.k_len);
  repeat(inputs.v, shape.k_len);
  inputs.sequences = {shape};
  return inputs;
}

// More work than the device does at a time: one query tile is begun while the one before it is finished, which a job in
// several tasks never does. Logits of 1e9 leave exponents that are wrong by dozens, whatever the reference.
TEST_P(CudaOrderTest, TilesInARow) {
  constexpr std::int64_t kLengths[] = {64, 128, 200, 64, 320, 1, 256, 77, 640, 0, 64, 129};
  std::vector<SequenceShape> sequences;
  std::int64_t query_tiles = 0;
  for (std::size_t i = 0; i < 80; ++i) {
    const std::int64_t n = kLengths[i % std::size(kLengths)];
    query_tiles += (n + 63) / 64;
    sequences.push_back(i % 7 == 3 ? SequenceShape{n, n + 150, 150} : SequenceShape{n, n, 0});
  }
  // Four heads, three at a time, on 132 SMs.
  ASSERT_GT(query_tiles * 4 / 3, 2 * 132);
  const auto check = [&](const AttentionInputs& inputs) {
    const AttentionResult in_a_row = attend_with(row(), inputs);
    return attend_with(row(), inputs, {.tiles_per_task = 1000, .separate_finish = true}).same_bits(in_a_row);
  };
  for_all_dims({-1, 0}, [&](const AttentionSpec& spec) {
    AttentionInputs inputs = random_inputs(spec, sequences, 93);
    EXPECT_TRUE(check(inputs));
    const Arrangement fetched_by_threads{.shuffle = 7, .sources = 5, .odd_keys = true};
    EXPECT_TRUE(attend_with(row(), inputs, fetched_by_threads).same_bits(attend_with(row(), inputs)));
    inputs.spec.mask = {-1, -1};
    EXPECT_TRUE(check(inputs)) << "full";
    inputs.spec.mask = {100, 20};
    inputs.spec.sinks = true;
    inputs.sinks = {0.5F, -1.0F, 2.0F, 0.0F};
    EXPECT_TRUE(check(inputs)) << "window and sinks";
    inputs.spec.mask = {-1, 0};
    for (std::vector<std::byte>* tensor : {&inputs.q, &inputs.k}) {
      for (std::size_t at = 0; at < tensor->size(); at += size_of(spec.dtype)) {
        const float large = 3e4F * load_element(tensor->data() + at, spec.dtype);
        store_element(tensor->data() + at, spec.dtype, std::clamp(large, -6e4F, 6e4F));  // fp16 ends at 65,504
      }
    }
    EXPECT_TRUE(check(inputs)) << "logits of 1e9";
  });
}

// A query tile of few key tiles, and, begun while that one is finished, one of so many that their sums complete KV
// splits.
TEST_P(CudaOrderTest, LongBehindShortTiles) {
  if (row().name == "sm80_simt") GTEST_SKIP() << "too slow, and begins nothing early";
  for_all_dims({-1, -1}, [&](AttentionSpec spec) {
    spec.heads = 16;
    spec.kv_heads = 8;
    // The short sequence comes first: it is not that short, and both together are more than the cache holds.
    const AttentionInputs inputs = random_inputs(spec, {{1280, 2560, 0}, {1280, 9000, 0}}, 94);
    const AttentionResult in_a_row = attend_with(row(), inputs);
    EXPECT_TRUE(all_written(in_a_row, spec.dtype));
    EXPECT_TRUE(attend_with(row(), inputs, {.tiles_per_task = 50}).same_bits(in_a_row));
  });
}

// Sections of heads, as all K and V are more than the cache holds, and query tiles that are left for last.
TEST_P(CudaOrderTest, SwizzleGroupsOfHeads) {
  if (row().name == "sm80_simt") GTEST_SKIP() << "too slow, and has no sections";
  for_all_dims({-1, 0}, [&](AttentionSpec spec) {
    spec.heads = 16;
    spec.kv_heads = 8;
    const AttentionInputs inputs = random_inputs(spec, {{7000, 7000, 0}}, 98);
    const AttentionResult whole = attend_with(row(), inputs);
    EXPECT_TRUE(all_written(whole, spec.dtype));
    EXPECT_TRUE(attend_with(row(), inputs, {.tiles_per_task = 30}).same_bits(whole));
  });
}

// Sixteen heads of the same keys, of many sequences: more work than the device does at a time, cut and brought any way.
TEST_P(CudaOrderTest, ManyHeadsOfTheSameKeys) {
  if (row().name == "sm80_simt") GTEST_SKIP() << "too slow";
  const SequenceShape shapes[] = {{1, 1, 0},   {200, 350, 150}, {64, 64, 0},    {0, 90, 0},
                                  {77, 77, 0}, {640, 641, 1},   {3, 1000, 997}, {129, 129, -40}};
  std::vector<SequenceShape> sequences;
  for (int i = 0; i < 3; ++i) sequences.insert(sequences.end(), std::begin(shapes), std::end(shapes));
  for_all_dims({-1, 0}, [&](AttentionSpec spec) {
    spec.heads = 16;
    spec.kv_heads = 1;
    AttentionInputs inputs = random_inputs(spec, sequences, 96);
    const AttentionInputs few = random_inputs(spec, {{77, 77, 0}, {150, 250, 100}}, 97);
    const AttentionResult result = attend_with(row(), few);
    EXPECT_EQ(check_accuracy(few, result.out, result.lse), "");
    for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}, Mask{100, 20}}) {
      inputs.spec.mask = mask;
      SCOPED_TRACE(describe(inputs.spec));
      const AttentionResult whole = attend_with(row(), inputs);
      EXPECT_TRUE(all_written(whole, spec.dtype));
      EXPECT_TRUE(attend_with(row(), inputs, {.tiles_per_task = 1000, .separate_finish = true}).same_bits(whole));
      EXPECT_TRUE(attend_with(row(), inputs, {.tiles_per_task = 3, .run_rows = 100, .shuffle = 8}).same_bits(whole));
      const Arrangement fetched_by_threads{.shuffle = 7, .sources = 5, .odd_keys = true};
      EXPECT_TRUE(attend_with(row(), inputs, fetched_by_threads).same_bits(whole));
    }
  });
}

// Query tiles in a row whose key tiles come as several runs.
TEST_P(CudaOrderTest, SeveralKeyRunsInARow) {
  if (row().name == "sm80_simt") GTEST_SKIP() << "too slow, and begins nothing early";
  for_all_dims({-1, -1}, [&](AttentionSpec spec) {
    spec.heads = 48;
    spec.kv_heads = 1;
    CudaSequence sequence(row(), random_inputs(spec, {{1500, 1000, 0}}, 95));
    sequence.make_results(3);
    sequence.enqueue_all(0);
    std::vector<CudaSequence::Tiles> ones;
    for (std::int64_t i = 0; i < sequence.tiles(); ++i) ones.push_back({i, 1});
    sequence.enqueue(ones, false, 1);
    sequence.enqueue({{0, 3}}, false, -1);
    sequence.enqueue({{3, sequence.tiles() - 3}}, true, 2);
    sequence.wait();
    EXPECT_EQ(sequence.result(1), sequence.result(0));
    EXPECT_EQ(sequence.result(2), sequence.result(0));
  });
}

// Query tiles are computed several at a time, by one CTA or by two: any number of them, so that any number lacks.
TEST_P(CudaOrderTest, AnyNumberOfQueryTiles) {
  if (row().name == "sm80_simt") GTEST_SKIP() << "too slow, and folds them one by one";
  for (const Dims& dims : wide_dims()) {
    for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}}) {
      const AttentionSpec spec = make_spec(dims, 8, 8, mask);
      for (const std::int64_t tiles : {109, 110, 111, 112, 113}) {
        SCOPED_TRACE(fmt::format("{}, {} tiles", describe(spec), tiles));
        const std::int64_t tokens = 64 * tiles - 5;
        const AttentionInputs inputs = repeated_inputs(spec, {tokens, tokens, 0}, 100);
        const AttentionResult whole = attend_with(row(), inputs);
        EXPECT_TRUE(all_written(whole, spec.dtype));
        EXPECT_TRUE(attend_with(row(), inputs, {.tiles_per_task = 30}).same_bits(whole));
        const Arrangement fetched_by_threads{.shuffle = 7, .sources = 5, .odd_keys = true};
        if (!mask.is_causal()) continue;
        EXPECT_TRUE(attend_with(row(), inputs, fetched_by_threads).same_bits(whole));
      }
    }
  }
}

// One task over keys that are far more than the cache holds, for which CTAs keep pace; two tasks over halves, which
// don't.
TEST_P(CudaOrderTest, KeysFarBeyondTheCache) {
  if (row().name == "sm80_simt") GTEST_SKIP() << "too slow, and keeps no pace";
  for (const Dims& dims : wide_dims()) {
    const AttentionSpec spec = make_spec(dims, 600, 1, {-1, 0});
    SCOPED_TRACE(describe(spec));
    const std::int64_t tokens = 41'000'000 / dims.head_dim;  // 164 MB
    CudaSequence sequence(row(), repeated_inputs(spec, {64, tokens, tokens - 64}, 101));
    sequence.make_results(3);
    const std::int64_t half = sequence.tiles() / 2;
    sequence.enqueue({{0, half}}, false, -1);
    sequence.enqueue({{half, sequence.tiles() - half}}, true, 0);
    sequence.enqueue_all(1);
    sequence.enqueue_all(2);
    sequence.wait();
    EXPECT_EQ(sequence.result(1), sequence.result(0));
    EXPECT_EQ(sequence.result(2), sequence.result(0));
  }
}

// A sequence in blocks: most query tiles of the later tasks see nothing, so they are resumed and finished back to back,
// faster than anything else comes. With this shape sm90_attention once skipped query tiles in nearly every run.
TEST_P(CudaOrderTest, BlocksOfALongSequence) {
  if (row().name == "sm80_simt") GTEST_SKIP() << "too slow";
  for (const Dims& dims : wide_dims()) {
    const AttentionSpec spec = make_spec(dims, 16, 8, {-1, 0});
    SCOPED_TRACE(describe(spec));
    CudaSequence sequence(row(), repeated_inputs(spec, {20'001, 20'001, 0}, 99));
    sequence.make_results(2);
    sequence.enqueue_all(0);
    sequence.wait();
    const CudaSequence::Result whole = sequence.result(0);
    const std::int64_t block = 4080 / sequence.kernel().key_tile();
    for (int repeat = 0; repeat < 5; ++repeat) {
      sequence.clear_results();
      for (std::int64_t first = 0; first < sequence.tiles(); first += block) {
        const bool last = first + block >= sequence.tiles();
        sequence.enqueue({{first, std::min(block, sequence.tiles() - first)}}, first > 0, last ? 1 : -1);
      }
      sequence.wait();
      ASSERT_EQ(sequence.result(1), whole) << "repeat " << repeat;
    }
  }
}

RINGATTN_FOR_EVERY_CUDA_KERNEL(CudaOrderTest);

}  // namespace
}  // namespace ringattn::testing
