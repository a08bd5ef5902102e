// SPDX-License-Identifier: Apache-2.0
// Blocks of keys that are chosen for a decode step on the host: those of the highest scores, as fp64 has them, the
// first and the rows' own among them; what a prefill's mask selects, too. That GPUs choose the same stands in
// cuda_block_choice_test.cpp.
#include "kernels/decode/block_choice.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/attention/block_score.hpp"
#include "kernels/common/platform.hpp"
#include "tests/support/block_chooser.hpp"
#include "tests/support/decode_runner.hpp"
#include "tests/support/special_values.hpp"
#include "tests/support/top_k_block_mask.hpp"

namespace ringattn::testing {
namespace {

std::vector<std::int32_t> numbers_of(const std::vector<std::byte>& bytes) {
  std::vector<std::int32_t> numbers(bytes.size() / 4);
  std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

AttentionInputs listed_inputs(Dtype dtype, int mask_heads, int rows, const std::vector<std::int64_t>& lengths,
                              std::uint64_t seed) {
  AttentionSpec spec = make_spec(dtype, 6, 2, 40, {-1, 0});
  spec.block_mask = {rows, 32, mask_heads};
  return decode_inputs(spec, rows, lengths, seed);
}

std::vector<std::int32_t> list_of(const BlockChooser& chooser, const BlockChooser::Result& result, std::int64_t list) {
  const std::vector<std::int32_t> chosen = numbers_of(result.chosen);
  const auto first = static_cast<std::size_t>(list * chooser.choice().count);
  const auto count = static_cast<std::size_t>(numbers_of(result.counts)[static_cast<std::size_t>(list)]);
  return {chosen.begin() + static_cast<std::ptrdiff_t>(first),
          chosen.begin() + static_cast<std::ptrdiff_t>(first + count)};
}

TEST(BlockChoice, IsThatOfPrefillsBlockMask) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32, Dtype::kF16}) {
    for (const int mask_heads : {1, 2}) {
      for (const int count : {1, 2, 3, 7, 100}) {
        // The rows of each sequence stand in one block, as prefill's mean queries are those of a block.
        const AttentionInputs inputs =
            listed_inputs(dtype, mask_heads, 2, {32 * 40 + 8, 32 * 9 + 2, 32, 2, 32 * 3 + 30}, 7);
        const AttentionSpec& spec = inputs.spec;
        BlockChooser chooser(cpu::make_cpu_backend({1, 0}), inputs, count % 2 == 0 ? 16 : 0, count);
        chooser.pool();
        const BlockChooser::Result result = chooser.choose();
        const BlockMask prefill = top_k_block_mask(inputs, count);
        const DecodeBlockMaskArrays expected = decode_block_mask(prefill, spec.mask, 2, count);
        EXPECT_EQ(numbers_of(result.counts), expected.counts) << count;
        for (std::size_t list = 0; list < expected.counts.size(); ++list) {
          const auto begin = expected.blocks.begin() + static_cast<std::ptrdiff_t>(list) * expected.stride;
          EXPECT_EQ(list_of(chooser, result, static_cast<std::int64_t>(list)),
                    std::vector<std::int32_t>(begin, begin + expected.counts[list]))
              << count;
        }
      }
    }
  }
}

// By the definition, in fp64: no block that is left out has a score that is higher by more than rounding.
TEST(BlockChoice, HasTheHighestScores) {
  const AttentionInputs inputs = listed_inputs(Dtype::kF32, 2, 3, {32 * 50 + 9, 32 * 21}, 9);
  const AttentionSpec& spec = inputs.spec;
  constexpr int kCount = 12;
  BlockChooser chooser(cpu::make_cpu_backend({1, 0}), inputs, 64, kCount);
  chooser.pool();
  const BlockChooser::Result result = chooser.choose();
  for (std::size_t s = 0; s < 2; ++s) {
    for (int head = 0; head < 2; ++head) {
      const std::int64_t own = (inputs.sequences[s].k_len - 3) / 32;
      std::vector<double> scores(static_cast<std::size_t>(own), 0.0);
      for (std::int64_t block = 0; block < own; ++block) {
        for (int h = head * 3; h < head * 3 + 3; ++h) {
          for (int d = 0; d < spec.head_dim; ++d) {
            double q = 0.0;
            double k = 0.0;
            const std::int64_t at = d * 4;
            for (int i = 0; i < 3; ++i) q += load_element(inputs.q_view(s).at(i, h) + at, spec.dtype) / 3.0;
            for (int i = 0; i < 32; ++i) {
              k += load_element(inputs.k_view(s).at(block * 32 + i, head) + at, spec.dtype) / 32.0;
            }
            scores[static_cast<std::size_t>(block)] += q * k * static_cast<double>(spec.softmax_scale);
          }
        }
      }
      const std::vector<std::int32_t> list = list_of(chooser, result, static_cast<std::int64_t>(s) * 2 + head);
      const std::int64_t of_rows = (inputs.sequences[s].k_len + 31) / 32 - own;
      ASSERT_EQ(static_cast<std::int64_t>(list.size()), kCount - of_rows);
      EXPECT_EQ(list[0], 0);
      EXPECT_TRUE(std::ranges::is_sorted(list));
      double least = std::numeric_limits<double>::infinity();
      for (const std::int32_t block : list) {
        if (block > 0) least = std::min(least, scores[static_cast<std::size_t>(block)]);
      }
      for (std::int32_t block = 1; block < own; ++block) {
        if (std::ranges::find(list, block) != list.end()) continue;
        EXPECT_LE(scores[static_cast<std::size_t>(block)], least + 1e-5) << block;  // a sum of 120 products of 32 bits
      }
    }
  }
}

TEST(BlockChoice, OfEqualScoresTheFirst) {
  AttentionInputs inputs = listed_inputs(Dtype::kF32, 1, 1, {32 * 20 + 5}, 11);
  std::ranges::fill(inputs.k, std::byte{0});  // every score is 0
  inputs.set_k(32 * 7, 0, 0, std::numeric_limits<float>::quiet_NaN());
  inputs.set_k(32 * 2, 1, 0, -0.0F);
  BlockChooser chooser(cpu::make_cpu_backend({1, 0}), inputs, 16, 10);
  chooser.pool();
  EXPECT_EQ(list_of(chooser, chooser.choose(), 0), (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 8, 9}));
}

TEST(BlockChoice, ScoresHaveAnOrder) {
  const std::vector<float> ascending = {-kInfinity, -3e38F, -1.0F, -1e-45F, 0.0F, 1e-45F, 1.0F, 3e38F, kInfinity};
  for (std::size_t i = 1; i < ascending.size(); ++i) {
    EXPECT_LT(order_of_score(ascending[i - 1]), order_of_score(ascending[i])) << ascending[i];
  }
  EXPECT_EQ(order_of_score(-0.0F), order_of_score(0.0F));
  EXPECT_EQ(order_of_score(std::nanf("")), order_of_score(-kInfinity));
  EXPECT_EQ(order_of_score(-std::nanf("")), order_of_score(-kInfinity));
}

// Steps that grow make the mean of each block when it is full; then all are as if they had been made at once.
TEST(BlockChoice, MeansFollowGrowingSequences) {
  for (const int rows : {1, 5, 16}) {
    const AttentionInputs inputs = listed_inputs(Dtype::kBf16, 2, rows, {32 * 12 + 3, 32 * 4, 400}, 13);
    BlockChooser steps(cpu::make_cpu_backend({1, 0}), inputs, 16, 4);
    BlockChooser whole(cpu::make_cpu_backend({1, 0}), inputs, 0, 4);
    whole.pool();
    constexpr std::int64_t kBack = 120;
    std::vector<std::int64_t> lengths;
    for (std::int64_t back = kBack; back >= 0; back = back > 0 ? std::max<std::int64_t>(0, back - rows) : -1) {
      lengths.clear();
      for (const SequenceShape& of : inputs.sequences) lengths.push_back(of.k_len - back);
      steps.set_lengths(lengths);
      back == kBack ? steps.pool() : steps.enqueue();
    }
    EXPECT_TRUE(steps.means() == whole.means()) << rows;
    const BlockChooser::Result result = steps.choose();
    const BlockChooser::Result expected = whole.choose();
    for (std::int64_t list = 0; list < 6; ++list) {  // entries of a longer earlier list remain after a list's end
      EXPECT_EQ(list_of(steps, result, list), list_of(whole, expected, list)) << rows;
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
