// SPDX-License-Identifier: Apache-2.0
// Decode with a block mask: rows have the bits of attention with the same mask, and with a mask of
// everything those of a decode step without a mask, by memcmp of O and LSE, for every kernel that decodes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "tests/kernels/decode/decode_row_test.hpp"
#include "tests/support/block_mask_inputs.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

class DecodeBlockMask : public DecodeRowTest {
 protected:
  TileSizes tiles_of(const AttentionSpec& spec) const {
    AttentionRunner runner(attention_row(), spec);
    return {runner.kernel().query_tile(), runner.kernel().key_tile()};
  }
  // Blocks of the fewest keys that both tiles divide, times `blocks`.
  BlockMaskShape shape_of(const AttentionSpec& spec, int heads, int blocks = 1) const {
    const TileSizes tiles = tiles_of(spec);
    return {tiles.query, std::lcm(tiles.query, tiles.key) * blocks, heads};
  }
  // In each of these caches.
  void expect_same_in(const AttentionInputs& inputs, const std::vector<CacheLayout>& layouts) const {
    const AttentionResult expected = folded(inputs);
    for (const CacheLayout& layout : layouts) {
      SCOPED_TRACE(fmt::format("{}, page {}, slices {}", describe(inputs.spec), layout.page_size, layout.slices));
      const AttentionResult got = DecodeRunner(row(), inputs, layout, 2).run();
      EXPECT_TRUE(got.same_bits(expected)) << first_difference(got, expected, inputs.spec);
      count_check();
    }
  }
  std::int64_t group_of(const AttentionSpec& spec) const { return std::int64_t{kTilesPerKvSplit} * tiles_of(spec).key; }
};

TEST_P(DecodeBlockMask, AreThoseOfAttention) {
  std::uint64_t seed = 1;
  for (const Dims& dims : all_dims(attention_row())) {
    AttentionSpec spec = make_spec(dims, 6, 2, seed % 3 == 0 ? Mask{-1, -1} : Mask{-1, 0});
    spec.sinks = seed % 2 == 0;
    spec.softcap = seed % 4 == 0 ? 15.0F : 0.0F;
    const BlockMaskShape shape = shape_of(spec, seed % 2 == 0 ? 1 : 2, seed % 5 == 0 ? 2 : 1);
    const std::int64_t block = shape.key_block;
    const AttentionInputs inputs =
        with_random_block_mask(decode_inputs(spec, 3, {1, 5 * block + 1, 3 * block, 0, 7 * block - 1, block}, seed),
                               shape, 40, static_cast<unsigned>(seed));
    const std::int64_t page = seed % 2 == 0 ? 16 : 256;
    expect_same_in(inputs, {{.page_size = page, .head_major = seed % 3 == 1}, {.mask_with_own = true}});
    ++seed;
  }
}

// 1 … 16 rows, which stand in two query tiles, and in two blocks.
TEST_P(DecodeBlockMask, EveryNumberOfRows) {
  for (const Dims& dims : usual_dims(attention_row())) {
    for (int rows = 1; rows <= kMaxDecodeRows; ++rows) {
      const AttentionSpec spec = make_spec(dims, 8, 2, rows % 4 == 0 ? Mask{-1, 3} : Mask{-1, 0});
      const BlockMaskShape shape = shape_of(spec, rows % 2 == 0 ? 2 : 1);
      const std::int64_t block = shape.key_block;
      expect_same(
          with_random_block_mask(decode_inputs(spec, rows, {9, 6 * block + rows / 2, 11 * block + 1, 4 * block + 60},
                                               static_cast<std::uint64_t>(rows)),
                                 shape, 50, static_cast<unsigned>(rows)),
          {.page_size = 64, .strided = rows % 5 == 0, .mask_with_own = rows % 3 == 0});
    }
  }
}

// Mask rows over several KV splits: a tile's index in the row decides its split, and not its position.
TEST_P(DecodeBlockMask, KvSplitsFollowFromPositions) {
  for (const Dims& dims : usual_dims(attention_row())) {
    for (const int heads : {1, 2}) {
      const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
      const std::int64_t group = group_of(spec);
      std::vector<CacheLayout> layouts = {{.page_size = 128}};
      if (row().backend == "cuda") {  // how many CTAs share a KV split
        layouts.insert(layouts.end(), {{.slices = 1},
                                       {.page_size = 16, .slices = 2},
                                       {.page_size = 16, .slices = 4},
                                       {.page_size = 64, .slices = 4}});
      }
      const std::int64_t longest = (row().backend == "cuda" ? 5 : 2) * group + 300;
      expect_same_in(with_random_block_mask(decode_inputs(spec, 2, {longest, group + 5, 2 * group + 1}, 31),
                                            shape_of(spec, heads), 60, 5),
                     layouts);
    }
  }
}

TEST_P(DecodeBlockMask, OfEverythingAreTheStepWithoutABlockMask) {
  for (const Dims& dims : usual_dims(attention_row())) {
    for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}}) {
      const AttentionSpec spec = make_spec(dims, 4, 2, mask);
      const std::int64_t group = group_of(spec);
      const AttentionInputs inputs = decode_inputs(spec, 3, {2 * group + 65, 200, 1, group}, 41);
      const AttentionResult dense = DecodeRunner(row(), inputs, {.page_size = 64}).run();
      for (const int heads : {1, 2}) {
        const AttentionInputs listed = with_random_block_mask(inputs, shape_of(spec, heads), 100, 1);
        const AttentionResult got = DecodeRunner(row(), listed, {.page_size = 32}, 2).run();
        count_check();
        EXPECT_TRUE(got.same_bits(dense)) << first_difference(got, dense, spec);
      }
    }
  }
}

// Keys outside the block mask are not read: they are NaN here. So are those after the sequences' ends.
TEST_P(DecodeBlockMask, NothingOutsideTheBlockMaskIsRead) {
  const AttentionSpec spec = make_spec(first_dims(), 4, 2, {-1, 0});
  const BlockMaskShape shape = shape_of(spec, 2);
  AttentionInputs inputs =
      with_random_block_mask(decode_inputs(spec, 2, {20 * shape.key_block + 9, 7 * shape.key_block}, 51), shape, 30, 9);
  const AttentionResult expected = folded(inputs);
  int hidden = 0;
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    const std::int64_t keys = inputs.sequences[s].k_len;
    for (int head = 0; head < spec.kv_heads; ++head) {
      for (std::int64_t key = 0; key < keys; ++key) {
        if (inputs.mask_has_key(s, head * 2, keys - 1, key)) continue;
        ++hidden;
        for (int d = 0; d < spec.head_dim; d += 5) inputs.set_k(inputs.k_begin(s) + key, head, d, kNan);
        for (int d = 0; d < spec.head_dim_v; d += 3) inputs.set_v(inputs.k_begin(s) + key, head, d, kNan);
      }
    }
  }
  ASSERT_GT(hidden, 1000);
  const AttentionResult got = DecodeRunner(row(), inputs, {.page_size = 64}).run();
  count_check();
  EXPECT_TRUE(got.same_bits(expected)) << first_difference(got, expected, spec);
}

// Rows that exceed the rescale threshold, in the KV splits of a mask row.
TEST_P(DecodeBlockMask, RowsThatExceedTheRescaleThreshold) {
  for (const Dims& dims : usual_dims(attention_row())) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    const std::int64_t group = group_of(spec);
    AttentionInputs inputs = decode_inputs(spec, 3, {3 * group + 50, group + 8}, 61);
    for (int head = 0; head < spec.heads; head += 2) inputs.set_q(1, head, 0, 1.0F / spec.softmax_scale);
    for (int head = 0; head < spec.kv_heads; ++head) {
      for (std::int64_t key = 300; key < 3 * group; key += 701) {
        inputs.set_k(key, head, 0, 30.0F + static_cast<float>(key % 97) * 3.0F);
      }
    }
    expect_same(with_random_block_mask(inputs, shape_of(spec, 2), 70, 3), {.page_size = 64});
  }
}

// The same object, with lengths and masks that change from step to step.
TEST_P(DecodeBlockMask, ThatChangeFromStepToStep) {
  const AttentionSpec spec = make_spec(first_dims(), 4, 2, {-1, 0});
  const BlockMaskShape shape = shape_of(spec, 2);
  const std::int64_t group = group_of(spec);
  const AttentionInputs longest = decode_inputs(spec, 2, {2 * group + 40, 500}, 71);
  DecodeRunner runner(row(), with_random_block_mask(longest, shape, 100, 0), {.page_size = 64}, 2);
  unsigned seed = 1;
  for (const std::int64_t less : {200, 42, 41, 40, 39, 38, 1, 0}) {
    std::vector<std::int64_t> lengths;
    for (const SequenceShape& sequence : longest.sequences) lengths.push_back(sequence.k_len - less);
    const AttentionInputs now = with_random_block_mask(shortened(longest, lengths), shape, 15 * (seed % 6), seed);
    ++seed;
    runner.set_lengths(lengths);
    runner.set_block_mask(now);
    EXPECT_TRUE(runner.run().same_bits(folded(now))) << less;
  }
}

TEST_P(DecodeBlockMask, WhatIsNotDoneIsNamed) {
  const AttentionSpec spec = make_spec(first_dims(), 4, 2, {-1, 0});
  const BlockMaskShape shape = shape_of(spec, 2);
  const auto missing = [&](const BlockMaskShape& block_mask, const Mask& mask) {
    DecodeSpec wanted{spec};
    wanted.attention.mask = mask;
    wanted.attention.block_mask = block_mask;
    return fmt::format("{}", fmt::join(row().missing(wanted), "; "));
  };
  count_check();
  EXPECT_EQ(missing(shape, {-1, 0}), "");
  EXPECT_NE(missing({shape.query_block, shape.key_block, 4}, {-1, 0}).find("a mask row for each query head"),
            std::string::npos);
  EXPECT_NE(missing(shape, {500, 0}).find("sliding window"), std::string::npos);
  EXPECT_NE(missing({shape.query_block, 16, 1}, {-1, 0}).find("multiples of"), std::string::npos);
}

RINGATTN_FOR_EVERY_DECODER(DecodeBlockMask);

}  // namespace
}  // namespace ringattn::testing
