// SPDX-License-Identifier: Apache-2.0
// Decoded rows are those of attention over the whole sequence, by memcmp of O and LSE, for every kernel that decodes.
#include "kernels/decode/decode.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/error.hpp"
#include "tests/kernels/decode/decode_row_test.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/block_mask_inputs.hpp"
#include "tests/support/environment.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kPages[] = {16, 32, 64, 128, 256};

class Decode : public DecodeRowTest {};

// Every set of head dims, under every kind of mask, dense and paged.
TEST_P(Decode, EveryConfiguration) {
  std::uint64_t seed = 1;
  for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}, Mask{150, 0}, Mask{90, 30}}) {
    for (const Dims& dims : all_dims(attention_row())) {
      AttentionSpec spec = make_spec(dims, 6, 2, mask);
      spec.sinks = seed % 2 == 0;
      spec.softcap = seed % 3 == 0 ? 15.0F : 0.0F;
      const AttentionInputs inputs = decode_inputs(spec, 3, {1, 700, 129, 0, 64, 311}, seed);
      expect_same(inputs, {});
      expect_same(inputs, {.page_size = kPages[seed % std::size(kPages)], .head_major = seed % 4 == 1});
      ++seed;
    }
  }
}

// A batch of lengths around the edges of tiles and KV splits.
TEST_P(Decode, LengthsAroundEdges) {
  for (const Dims& dims : usual_dims(attention_row())) {
    for (const Mask& mask : {Mask{-1, 0}, Mask{8250, 0}}) {
      const AttentionSpec spec = make_spec(dims, 4, 2, mask);
      const std::int64_t group =
          std::int64_t{kTilesPerKvSplit} * AttentionRunner(attention_row(), spec).kernel().key_tile();
      std::vector<std::int64_t> lengths = {1, 127, 128, 129, group - 1, group, group + 1, 2 * group + 65, 20000};
      if (long_tests()) lengths.push_back(65537);
      const AttentionInputs inputs = decode_inputs(spec, 1, lengths, 21);
      expect_same(inputs, {});
      expect_same(inputs, {.page_size = 64}, 2);
      const AttentionInputs several = decode_inputs(spec, 5, {group + 2, group + 63, group + 64, 3, 2 * group + 1}, 22);
      expect_same(several, {}, 3);
      expect_same(several, {.page_size = 128, .head_major = true});
    }
  }
}

// 1 … 16 rows a sequence. Rows of a step may belong to two query tiles, and so use different key tiles and KV splits.
TEST_P(Decode, EveryNumberOfRows) {
  for (const Dims& dims : usual_dims(attention_row())) {
    const std::int64_t group = std::int64_t{kTilesPerKvSplit} *
                               AttentionRunner(attention_row(), make_spec(dims, 4, 2, {})).kernel().key_tile();
    for (int rows = 1; rows <= kMaxDecodeRows; ++rows) {
      AttentionSpec spec = make_spec(dims, 4, 2, rows % 2 == 0 ? Mask{-1, 0} : Mask{200, 5});
      spec.sinks = rows % 3 == 0;
      expect_same(decode_inputs(spec, rows, {9, 130, 64, group + 3}, static_cast<std::uint64_t>(rows)),
                  {.page_size = kPages[static_cast<std::size_t>(rows) % std::size(kPages)], .strided = rows % 5 == 0});
    }
  }
}

TEST_P(Decode, EveryHeadRatio) {
  struct Heads {
    int heads, kv_heads, rows;
  };
  for (const Dims& dims : usual_dims(attention_row())) {
    for (const Heads& of : {Heads{4, 4, 2}, Heads{8, 1, 1}, Heads{6, 2, 16}, Heads{5, 1, 13}, Heads{32, 1, 3},
                            Heads{64, 1, 16}, Heads{12, 4, 7}}) {
      expect_same(decode_inputs(make_spec(dims, of.heads, of.kv_heads, {-1, 0}), of.rows, {500, 77}, 31),
                  {.page_size = 32});
    }
  }
}

// The same rows of an attention run in which every token of the sequence is a query.
TEST_P(Decode, RowsOfAWholePrefill) {
  for (const Dims& dims : dims()) {
    for (const Mask& mask : {Mask{-1, 0}, Mask{100, 0}}) {
      const AttentionSpec spec = make_spec(dims, 4, 2, mask);
      constexpr std::int64_t kKeys = 333;
      AttentionInputs whole = random_inputs(spec, {{kKeys, kKeys, 0}}, 41);
      const AttentionResult all = folded(whole);
      for (const int rows : {1, 4, 16}) {
        AttentionInputs last = whole;
        last.sequences = {{rows, kKeys, kKeys - rows}};
        const auto tail = [&](const auto& of_all) {
          return std::remove_cvref_t<decltype(of_all)>(
              of_all.end() - static_cast<std::ptrdiff_t>(of_all.size()) / kKeys * rows, of_all.end());
        };
        last.q = tail(whole.q);
        const AttentionResult expected{tail(all.out), tail(all.lse), {}};
        EXPECT_TRUE(DecodeRunner(row(), last, {.page_size = 16}).run().same_bits(expected)) << rows;
      }
    }
  }
}

// Pages of every size in any order, shared by sequences, in pools whose other slots are NaN.
TEST_P(Decode, AnyPages) {
  const AttentionSpec spec = make_spec(first_dims(), 4, 2, {-1, 0});
  AttentionInputs inputs = decode_inputs(spec, 2, {900, 700, 1300}, 51);
  constexpr std::int64_t kShared = 512;
  for (const std::int64_t s : {1, 2}) {
    const auto share = [&](std::vector<std::byte>& rows) {
      const std::size_t row = rows.size() / static_cast<std::size_t>(inputs.k_tokens());
      std::copy_n(rows.begin(), row * kShared,
                  rows.begin() + static_cast<std::ptrdiff_t>(
                                     row * static_cast<std::size_t>(inputs.k_begin(static_cast<std::size_t>(s)))));
    };
    share(inputs.k);
    share(inputs.v);
  }
  const AttentionResult expected = folded(inputs);
  EXPECT_EQ(check_accuracy(inputs, expected.out, expected.lse), "");
  for (const std::int64_t page : kPages) {
    for (const std::uint64_t shuffle : {1U, 2U, 3U}) {
      for (const std::int64_t shared : {std::int64_t{0}, kShared}) {
        const CacheLayout layout{page, shuffle == 2, shuffle, shared};
        EXPECT_TRUE(DecodeRunner(row(), inputs, layout).run().same_bits(expected)) << page << ", order " << shuffle;
      }
    }
  }
}

// As many sequences as a typical step has, and more work tiles than SMs, with and without pages.
TEST_P(Decode, ManySequences) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t s = 0; s < 256; ++s) lengths.push_back(s * 37 % 331);
  for (const Dims& dims : usual_dims(attention_row())) {
    const AttentionInputs inputs = decode_inputs(make_spec(dims, 4, 2, {-1, 0}), 1, lengths, 23);
    expect_same(inputs, {}, 2);
    expect_same(inputs, {.page_size = 16, .shuffle = 6}, 2);
  }
}

// More sequences than a launch takes, of which some have several KV splits: wherever a launch ends, each sequence has
// the bits that it has in a smaller batch.
TEST_P(Decode, MoreSequencesThanALaunch) {
  const AttentionSpec spec = make_spec(first_dims(), 2, 1, {-1, 0});
  const std::int64_t group =
      std::int64_t{kTilesPerKvSplit} * AttentionRunner(attention_row(), spec).kernel().key_tile();
  for (const std::int64_t count : {1025, 3000}) {
    if (count > 1025 && row().backend == "cpu") continue;  // has no launches
    std::vector<std::int64_t> lengths;
    for (std::int64_t s = 0; s < count; ++s) lengths.push_back(s * 37 % 61);
    expect_same(decode_inputs(spec, 1, lengths, 26), {}, 2);
    for (const std::int64_t s : {std::int64_t{3}, count / 2, count - 1}) {
      lengths[static_cast<std::size_t>(s)] = group + 1 + s % 64;
    }
    const AttentionInputs inputs = decode_inputs(spec, 1, lengths, 25);
    const AttentionResult expected = folded(inputs);
    const AttentionResult together = DecodeRunner(row(), inputs, {.page_size = 16, .shuffle = 6}, 2).run();
    EXPECT_TRUE(together.same_bits(expected)) << first_difference(together, expected, spec);
    constexpr std::size_t kFew = 100;
    for (std::size_t first : {std::size_t{0}, std::size_t{470}, lengths.size() - kFew}) {
      const AttentionInputs few = sequences_of(inputs, first, kFew);
      const AttentionResult alone = DecodeRunner(row(), few, {.page_size = 64}, 2).run();
      EXPECT_TRUE(alone.same_bits(rows_of(together, few, first))) << count << ", " << first;
    }
  }
}

// Parts of a step write what the step does, however many sequences a part has: dense and in pages, with padding after
// rows, with a block mask, shared prefixes, and where partials are left.
TEST_P(Decode, PartsOfAStep) {
  AttentionSpec spec = make_spec(first_dims(), 4, 2, {-1, 0});
  spec.sinks = true;
  AttentionRunner attention_runner(attention_row(), spec);
  const int tile = static_cast<int>(attention_runner.kernel().key_tile());
  const std::int64_t group = std::int64_t{kTilesPerKvSplit} * tile;
  const std::vector<std::int32_t> prefix_of = {0, -1, 1, 0, 1, 0, 1};
  const std::vector<std::int32_t> prefix_keys = {2 * tile, static_cast<std::int32_t>(group)};
  const std::vector<std::int64_t> lengths = {3 * tile + 9, 0, group + 70, 2 * tile + 5, 5, 5 * tile, group + 9};
  const AttentionInputs plain = with_prefixes(decode_inputs(spec, 3, lengths, 27), prefix_of, prefix_keys);
  const int query_tile = attention_runner.kernel().query_tile();
  const AttentionInputs listed = with_random_block_mask(plain, {query_tile, std::lcm(query_tile, tile), 2}, 60, 3);
  struct Case {
    const AttentionInputs& inputs;
    CacheLayout layout;
  };
  for (const auto& [inputs, layout] : {Case{plain, {}},
                                       {plain, {.page_size = 32, .strided = true}},
                                       {plain, {.page_size = 64, .prefix_of = prefix_of, .prefix_keys = prefix_keys}},
                                       {listed, {}},
                                       {listed, {.page_size = 16}}}) {
    const AttentionResult expected = folded(inputs);
    DecodeRunner runner(row(), inputs, layout, 2);
    for (const std::int64_t limit : {1, 3}) {
      runner.set_part_limit(limit);
      const AttentionResult got = runner.run();
      EXPECT_TRUE(got.same_bits(expected))
          << limit << ", page " << layout.page_size << ": " << first_difference(got, expected, spec);
    }
  }
  const AttentionResult expected = folded(plain);
  for (const std::int64_t page : {0, 32}) {
    DecodeRunner runner(row(), plain, {.page_size = page}, 2);
    runner.make_partials(splits_per_partition(group + 70, 1, group));
    for (const std::int64_t limit : {2, 3}) {
      runner.set_part_limit(limit);
      runner.enqueue_leave(runner.backend().stream());
      runner.enqueue_merge({runner.partials()}, runner.backend().stream());
      EXPECT_TRUE(runner.read().same_bits(expected)) << limit << ", page " << page;
    }
  }
}

// A tail lies sequence by sequence, and scales of heads are there once. A dense cache's page is a sequence.
TEST(DecodeStep, PartsOfCompressedCaches) {
  const RowFormat tails = parse_row_format("int4_channel group 32");
  const RowFormat heads = parse_row_format("fp8 head");
  DecodeSpec spec{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), false, {tails, heads}};
  std::vector<std::byte> memory(1 << 16);
  std::byte* const at = memory.data();
  std::vector<std::int32_t> numbers(64);
  DecodeStep step;
  step.rows = 2;
  step.q = dense_view(static_cast<const void*>(at), Dtype::kBf16, 20, 4, 64);
  step.lengths = numbers.data();
  const RowShape shape{Dtype::kBf16, 2, 64};
  step.quantized_k = {tails, shape, 10, 512, {{{at, 1000, 10, 5}, {at + 8, 2000, 20, 10}}}, {at + 16}};
  step.quantized_v = {heads, shape, 10, 512, {{{at + 24, 3000, 30, 15}}}, {at + 32}};
  const DecodeStep dense = sub_batch(spec, step, 3, 4, 0);
  EXPECT_EQ(dense.q.tokens, 8);
  EXPECT_EQ(dense.q.data, at + 3 * 2 * 4 * 64 * 2);
  EXPECT_EQ(dense.lengths, numbers.data() + 3);
  EXPECT_EQ(dense.quantized_k.pages, 7);
  EXPECT_EQ(dense.quantized_k.streams[0].data, at + 3 * 1000);
  EXPECT_EQ(dense.quantized_k.streams[1].data, at + 8 + 3 * 2000);
  EXPECT_EQ(dense.quantized_k.streams[2].data, nullptr);
  EXPECT_EQ(dense.quantized_k.tables[0], at + 16 + 3 * 32 * 2 * 64 * 2);  // [sequences, group, heads, dim]
  EXPECT_EQ(dense.quantized_v.streams[0].data, at + 24 + 3 * 3000);
  EXPECT_EQ(dense.quantized_v.tables[0], at + 32);
  step.block_table = {numbers.data(), 5};
  const DecodeStep paged = sub_batch(spec, step, 3, 4, 0);
  EXPECT_EQ(paged.block_table.pages, numbers.data() + 15);
  EXPECT_EQ(paged.quantized_k.pages, 10);
  EXPECT_EQ(paged.quantized_k.streams[0].data, at);
  EXPECT_EQ(paged.quantized_k.tables[0], dense.quantized_k.tables[0]);
}

// A sequence of one key more than 64k.
TEST_P(Decode, ALongSequence) {
  const AttentionInputs inputs = decode_inputs(make_spec(first_dims(), 2, 1, {-1, 0}), 1, {65537}, 24);
  expect_same(inputs, {.page_size = 64}, 2);
}

// Pages that are far smaller than tiles, however many CTAs share a KV split. Sequences end inside of a page,
// with it, or with the first token of one.
TEST_P(Decode, SmallPages) {
  for (const Dims& dims : varied_dims(attention_row())) {
    if (dims.head_dim > 256) continue;  // their inputs take long to make
    const AttentionSpec spec = make_spec(dims, 32, 4, {-1, 0});
    const std::int64_t tile = AttentionRunner(attention_row(), spec).kernel().key_tile();
    for (const int rows : {1, 2}) {
      const AttentionInputs inputs = decode_inputs(
          spec, rows, {1, 15, 16, 17, 0, 2 * tile, 5 * tile + 33, kTilesPerKvSplit * tile + 9, 6 * tile - 1},
          static_cast<std::uint64_t>(110 + rows));
      const AttentionResult expected = folded(inputs);
      for (const std::int64_t page : {16, 32}) {
        for (const int slices : row().backend == "cuda" ? std::vector{0, 2, 4} : std::vector{0}) {
          SCOPED_TRACE(fmt::format("{}, {} rows, page {}, slices {}", describe(spec), rows, page, slices));
          const CacheLayout layout{.page_size = page, .head_major = page == 32, .shuffle = 4, .slices = slices};
          const AttentionResult got = DecodeRunner(row(), inputs, layout, 2).run();
          EXPECT_TRUE(got.same_bits(expected)) << first_difference(got, expected, spec);
        }
      }
    }
  }
}

// A latent and its rotary key are one row: the values are its first columns.
TEST_P(Decode, ValuesThatLieInTheKeys) {
  for (const Dims& dims : varied_dims(attention_row())) {
    if (dims.head_dim_v > dims.head_dim) continue;
    const AttentionSpec spec = make_spec(dims, 8, 1, {-1, 0});
    const AttentionInputs inputs = with_values_in_keys(decode_inputs(spec, 2, {300, 129, 2, 1000}, 43));
    for (const CacheLayout& layout : {CacheLayout{.values_in_keys = true},
                                      {.page_size = 64, .strided = true, .values_in_keys = true},
                                      {.page_size = 16, .head_major = true, .values_in_keys = true}}) {
      expect_same(inputs, layout, 2);
    }
  }
}

// All heads of a model over the one KV head of its latents, up to 2,048 rows of a sequence, around the edge of a KV
// split.
TEST_P(Decode, AllHeadsOfAModel) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    const Dims dims{dtype, 576, 512};
    const AttentionSpec of_row = make_spec(dims, 16, 1, {-1, 0});
    if (!cannot_run(attention_row(), of_row).empty()) GTEST_SKIP() << cannot_run(attention_row(), of_row);
    const std::int64_t group =
        std::int64_t{kTilesPerKvSplit} * AttentionRunner(attention_row(), of_row).kernel().key_tile();
    struct Step {
      int heads, rows;
      std::vector<std::int64_t> lengths;
    };
    for (const Step& step : {Step{16, 1, {group - 1, group, group + 1, 1, 65}}, Step{16, 3, {group + 2, 33, 0}},
                             Step{64, 2, {300, 31}}, Step{128, 1, {group + 5, 64}}, Step{128, 16, {40}}}) {
      const AttentionSpec spec = make_spec(dims, step.heads, 1, {-1, 0});
      const AttentionInputs inputs = with_values_in_keys(decode_inputs(spec, step.rows, step.lengths, 44));
      expect_same(inputs, {.page_size = 64, .values_in_keys = true}, 2);
    }
  }
}

// The global layers of Gemma 4: 32 query heads over 4 KV heads of 512 columns.
TEST_P(Decode, HeadsOf512Columns) {
  if (row().backend == "cpu") GTEST_SKIP() << "has the same code for every head dim";
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    AttentionSpec spec = make_spec(Dims{dtype, 512, 512}, 32, 4, {-1, 0});
    spec.softmax_scale = 1.0F / 16;
    if (!cannot_run(attention_row(), spec).empty()) GTEST_SKIP() << cannot_run(attention_row(), spec);
    const std::int64_t group =
        std::int64_t{kTilesPerKvSplit} * AttentionRunner(attention_row(), spec).kernel().key_tile();
    struct Step {
      int rows;
      std::vector<std::int64_t> lengths;
      CacheLayout layout;
    };
    for (const Mask& mask : {Mask{-1, 0}, Mask{700, 0}}) {
      spec.mask = mask;
      for (const Step& step : {Step{1, {group - 1, group, group + 1, 1, 0, 65}, {}},
                               {1, {group - 1, group, group + 1, 1, 0, 65}, {.page_size = 16, .shuffle = 3}},
                               {3, {group + 2, 33, 0, 1000}, {.page_size = 64, .head_major = true, .strided = true}},
                               {16, {40, 2 * group + 7}, {.page_size = 256}}}) {
        const AttentionInputs inputs = decode_inputs(spec, step.rows, step.lengths, 45);
        expect_same(inputs, step.layout, 2);
      }
      spec.sinks = true;
      spec.softcap = 30.0F;
      expect_same(decode_inputs(spec, 2, {300, 31, group + 5}, 46), {.page_size = 32}, 2);
      spec.sinks = false;
      spec.softcap = 0.0F;
    }
  }
}

// Rows that exceed the rescale threshold of a middle KV split by far, in one of its later tiles, and then again.
TEST_P(Decode, RowsThatExceedTheRescaleThreshold) {
  for (const Dims& dims : usual_dims(attention_row())) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    const std::int64_t group =
        std::int64_t{kTilesPerKvSplit} * AttentionRunner(attention_row(), spec).kernel().key_tile();
    const std::int64_t keys = 3 * group - 50;
    AttentionInputs inputs = decode_inputs(spec, 3, {keys}, 61);
    for (int head = 0; head < spec.heads; head += 2) inputs.set_q(1, head, 0, 1.0F / spec.softmax_scale);
    for (const auto& [key, level] :
         {std::pair{group + 3000, 120.0F}, {group + 3001, 90.0F}, {group + 7000, 300.0F}, {2 * group + 900, 80.0F}}) {
      for (int head = 0; head < spec.kv_heads; ++head) inputs.set_k(key, head, 0, level);
    }
    expect_same(inputs, {});
    expect_same(inputs, {.page_size = 16});
    expect_same(inputs, {.page_size = 256});
  }
}

// However many CTAs share a KV split. All dims of a kernel that is compiled for few.
TEST_P(Decode, AnyPartition) {
  constexpr std::size_t kFew = 14;
  const std::vector<Dims> all = all_dims(attention_row());
  for (const Dims& dims : all.size() <= kFew ? all : usual_dims(attention_row())) {
    for (const Mask& mask : {Mask{-1, 0}, Mask{150, 0}, Mask{-1, -1}}) {
      if (dims.head_dim > 256 && !mask.is_causal()) continue;  // their inputs take long to make
      const AttentionSpec spec = make_spec(dims, 4, 2, mask);
      const std::int64_t group =
          std::int64_t{kTilesPerKvSplit} * AttentionRunner(attention_row(), spec).kernel().key_tile();
      for (const int rows : {1, 6}) {
        const AttentionInputs few = decode_inputs(spec, rows, {1, 2 * group + 65, 130, group + 3, 0, 900, group}, 101);
        AttentionInputs outgrows = decode_inputs(spec, rows, {group + 700, 5, 2000}, 102);
        for (int head = 0; head < spec.heads; head += 3) outgrows.set_q(rows - 1, head, 0, 1.0F / spec.softmax_scale);
        for (const std::int64_t key : {group + 560, group + 670, std::int64_t{300}, group - 5}) {
          for (int head = 0; head < spec.kv_heads; ++head) {
            outgrows.set_k(key, head, 0, 70.0F + static_cast<float>(key % 997));
          }
        }
        outgrows.set_v(group + 699, 0, 1, kNan);
        const AttentionResult expected_few = folded(few);
        const AttentionResult expected_outgrows = folded(outgrows);
        for (const int slices :
             row().backend == "cuda" ? std::vector{2, 4} : std::vector{0}) {  // all that are compiled
          SCOPED_TRACE(fmt::format("{}, {} rows, slices {}", describe(spec), rows, slices));
          const CacheLayout layout{
              .page_size = kPages[static_cast<std::size_t>(slices / 2 + rows / 3) % std::size(kPages)],
              .slices = slices};
          EXPECT_TRUE(DecodeRunner(row(), few, layout).run().same_bits(expected_few));
          EXPECT_TRUE(DecodeRunner(row(), outgrows, {.slices = slices}).run().same_bits(expected_outgrows));
        }
      }
    }
  }
}

// What isn't finite changes the rows that use its tile, as in attention, and no others.
TEST_P(Decode, NotFinite) {
  for (const Dims& dims : usual_dims(attention_row())) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    for (const std::int64_t length : {std::int64_t{300}, std::int64_t{129}, std::int64_t{8200}}) {
      AttentionInputs inputs = decode_inputs(spec, 16, {length, 90}, 71);
      inputs.set_v(length - 1, 0, 3, kNan);  // the first rows of the step don't see it
      inputs.set_v(length - 3, 1, 1, kInfinity);
      inputs.set_k(length / 2, 1, 7, kNan);
      expect_same(inputs, {.page_size = 32});
      expect_same(inputs, {});
    }
  }
}

// Sequences that grow token by token, over the edge of a KV split: only the lengths change.
TEST_P(Decode, GrowingSequences) {
  const AttentionSpec spec = make_spec(first_dims(), 2, 1, {-1, 0});
  const std::int64_t group =
      std::int64_t{kTilesPerKvSplit} * AttentionRunner(attention_row(), spec).kernel().key_tile();
  const AttentionInputs longest = decode_inputs(spec, 2, {group + 9, 40}, 81);
  DecodeRunner runner(row(), longest, {.page_size = 64}, 2);
  for (const std::int64_t less : {45, 20, 11, 10, 9, 8, 7, 1, 0}) {
    const std::vector<std::int64_t> lengths = {group + 9 - less, std::max<std::int64_t>(0, 40 - less)};
    runner.set_lengths(lengths);
    EXPECT_TRUE(runner.run().same_bits(folded(shortened(longest, lengths)))) << less;
  }
}

TEST_P(Decode, RefusesOtherPages) {
  const AttentionInputs inputs = decode_inputs(make_spec(first_dims(), 2, 1, {-1, 0}), 1, {50}, 91);
  for (const std::int64_t page : {8, 48, 512}) {
    const Error error = error_of([&] { DecodeRunner(row(), inputs, {.page_size = page}).run(); });
    count_check();
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
  }
}

RINGATTN_FOR_EVERY_DECODER(Decode);

}  // namespace
}  // namespace ringattn::testing
