// SPDX-License-Identifier: Apache-2.0
// Top-k block selection on the host: what they take, that pieces of rows don't matter, and what is refused. That
// GPUs make the same masks stands in cuda_block_mask_choice_test.cpp.
#include "kernels/attention/top_k_selection.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.hpp"
#include "kernels/attention/block_mask_choice.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/top_k_block_mask.hpp"

namespace ringattn::testing {
namespace {

using Blocks = std::vector<std::int32_t>;

Blocks list_of(const BlockMask& block_mask, std::size_t sequence, int head, std::int64_t block) {
  const auto list = block_mask.row(sequence, head, block);
  return {list.begin(), list.end()};
}

TEST(RowPooling, MeansDontDependOnPieces) {
  const AttentionInputs inputs = random_inputs(make_spec(Dtype::kBf16, 4, 2, 16, {-1, 0}), {{300, 300, 0}}, 3);
  const auto pooled = [&](std::int64_t piece) {
    std::vector<float> means(6 * 4 * 16, std::nanf(""));  // −70 … 229
    for (std::int64_t begin = 0; begin < 300; begin += piece) {
      TensorView part = inputs.q_view(0);
      part.data = part.at(begin, 0);
      part.tokens = std::min(piece, 300 - begin);
      pool_host_rows({part, begin - 70, {-70, 230}, 64, -2, means.data()});
    }
    return means;
  };
  const std::vector<float> whole = pooled(300);
  for (const std::int64_t piece : {1, 7, 64}) EXPECT_EQ(pooled(piece), whole) << piece;
  double sum = 0.0;
  for (std::int64_t i = 6; i < 70; ++i) {
    sum += static_cast<double>(load_element(inputs.q_view(0).at(i, 2) + 2 * 5, Dtype::kBf16));
  }
  EXPECT_NEAR(whole[(1 * 4 + 2) * 16 + 5], sum / 64.0, 1e-6);
  float first = 0.0F;  // a block of six rows: −70 … −65
  for (std::int64_t i = 0; i < 6; ++i) first += load_element(inputs.q_view(0).at(i, 1), Dtype::kBf16);
  EXPECT_EQ(whole[16], first * (1.0F / 6.0F));
}

TEST(TopKSelection, TakeTheBestTheFirstAndTheDiagonal) {
  AttentionInputs inputs = random_inputs(make_spec(Dtype::kF32, 1, 1, 8, {-1, 0}), {{512, 512, 0}}, 1);
  inputs.spec.block_mask = {64, 64, 1};
  const auto set = [&](std::int64_t block, float value) {
    for (std::int64_t i = 0; i < 64; ++i) inputs.set_k(block * 64 + i, 0, 0, value);
  };
  for (std::int64_t i = 0; i < 512; ++i) {
    for (int d = 0; d < 8; ++d) {
      inputs.set_q(i, 0, d, 1.0F);
      inputs.set_k(i, 0, d, 0.0F);
    }
  }
  const auto listed = [&](int count, std::int64_t block) {
    return list_of(top_k_block_mask(inputs, count), 0, 0, block);
  };
  EXPECT_EQ(listed(4, 7), (Blocks{0, 1, 2, 7}));  // all equal: the lower numbers
  set(5, 2.0F);
  set(3, 1.0F);
  set(6, std::nanf(""));
  EXPECT_EQ(listed(4, 7), (Blocks{0, 3, 5, 7}));
  EXPECT_EQ(listed(3, 7), (Blocks{0, 5, 7}));
  EXPECT_EQ(listed(1, 7), (Blocks{0, 7}));
  EXPECT_EQ(listed(1, 0), (Blocks{0}));
  EXPECT_EQ(listed(7, 7), (Blocks{0, 1, 2, 3, 4, 5, 7}));  // NaN comes last
  EXPECT_EQ(listed(100, 2), (Blocks{0, 1, 2}));
  set(4, std::numeric_limits<float>::infinity());
  set(2, -std::numeric_limits<float>::infinity());
  EXPECT_EQ(listed(3, 7), (Blocks{0, 4, 7}));
  EXPECT_EQ(listed(7, 7), (Blocks{0, 1, 2, 3, 4, 5, 7}));  // −∞ and NaN are equal
  inputs.spec.mask = {130, 0};
  EXPECT_EQ(listed(2, 7), (Blocks{4, 7}));
  inputs.spec.mask = {-1, -1};  // the diagonal lies among the others
  EXPECT_EQ(listed(3, 3), (Blocks{0, 3, 4}));
  EXPECT_EQ(listed(3, 0), (Blocks{0, 4, 5}));  // the diagonal is the first one, and counts once
}

// By the definition, block by block: every score is that of decode steps (attention/block_score.hpp).
TEST(TopKSelection, HaveTheHighestScores) {
  AttentionInputs inputs =
      random_inputs(make_spec(Dtype::kF16, 6, 2, 40, {-1, 0}), {{}, {700, 900, 200}, {1, 77, 76}}, 5);
  const AttentionSpec& spec = inputs.spec;
  for (const int heads : {1, 2, 3, 6}) {
    inputs.spec.block_mask = {32, 16, heads};
    const BlockMask block_mask = top_k_block_mask(inputs, 9);
    for (std::size_t s = 1; s < 3; ++s) {
      const SequenceShape& of = inputs.sequences[s];
      for (std::int64_t block = of.q_offset / 32; block * 32 < of.k_len; ++block) {
        const std::int64_t begin = std::max(block * 32, of.q_offset) - of.q_offset;
        const std::int64_t end = std::min((block + 1) * 32, of.q_offset + of.q_len) - of.q_offset;
        const std::int64_t diagonal = (of.q_offset + end - 1) / 16;
        for (int head = 0; head < heads; ++head) {
          std::vector<double> scores(static_cast<std::size_t>(diagonal) + 1, 0.0);
          for (int h = head * 6 / heads; h < (head + 1) * 6 / heads; ++h) {
            for (std::int64_t b = 0; b <= diagonal; ++b) {
              const std::int64_t keys = std::min<std::int64_t>(16, of.k_len - b * 16);
              for (int d = 0; d < 40; ++d) {
                double q = 0.0;
                double k = 0.0;
                for (std::int64_t i = begin; i < end; ++i) {
                  q += static_cast<double>(load_element(inputs.q_view(s).at(i, h) + 2 * d, spec.dtype));
                }
                for (std::int64_t i = 0; i < keys; ++i) {
                  k += static_cast<double>(load_element(inputs.k_view(s).at(b * 16 + i, h / 3) + 2 * d, spec.dtype));
                }
                scores[static_cast<std::size_t>(b)] += q / static_cast<double>(end - begin) * k /
                                                       static_cast<double>(keys) *
                                                       static_cast<double>(spec.softmax_scale);
              }
            }
          }
          const Blocks list = list_of(block_mask, s, head, block);
          EXPECT_EQ(list.size(), static_cast<std::size_t>(std::min<std::int64_t>(9, diagonal + 1)));
          EXPECT_EQ(list.front(), 0);
          EXPECT_EQ(list.back(), diagonal);
          double least = std::numeric_limits<double>::infinity();
          for (const std::int32_t b : list) {
            if (b != 0 && b != diagonal) least = std::min(least, scores[static_cast<std::size_t>(b)]);
          }
          for (std::int64_t b = 1; b < diagonal; ++b) {
            if (std::ranges::find(list, b) != list.end()) continue;
            EXPECT_LE(scores[static_cast<std::size_t>(b)], least + 1e-5);  // a sum of 240 products of 32 bits
          }
        }
      }
    }
  }
}

TEST(TopKSelection, DontDependOnPiecesOrOnHowManyBlocksAreChosenForAtATime) {
  AttentionInputs inputs = random_inputs(make_spec(Dtype::kBf16, 4, 2, 16, {-1, 0}), {{300, 500, -70}, {9, 9, 0}}, 3);
  inputs.spec.block_mask = {32, 16, 2};
  const BlockMask whole = top_k_block_mask(inputs, 5);
  for (const std::int64_t piece : {1, 7, 64}) EXPECT_TRUE(top_k_block_mask(inputs, 5, piece) == whole) << piece;
  // So many heads that few query blocks fit in memory at a time, and only the last row.
  inputs = random_inputs(make_spec(Dtype::kF32, 64, 64, 4, {-1, 0}), {{600, 600, 0}}, 4);
  inputs.spec.block_mask = {1, 1, 64};
  const BlockMask many = top_k_block_mask(inputs, 4);
  AttentionInputs last = inputs;
  last.sequences = {{1, 600, 599}};
  last.q.assign(inputs.q.end() - 64 * 4 * 4, inputs.q.end());
  const BlockMask one = top_k_block_mask(last, 4);
  for (int head = 0; head < 64; ++head) EXPECT_EQ(list_of(one, 0, head, 599), list_of(many, 0, head, 599)) << head;
}

TEST(TopKSelection, OfNothing) {
  AttentionInputs inputs =
      random_inputs(make_spec(Dtype::kBf16, 2, 1, 8, {-1, 0}), {{}, {5, 0, 0}, {3, 40, -9}, {0, 9, 0}}, 3);
  inputs.spec.block_mask = {4, 4, 1};
  const BlockMask block_mask = top_k_block_mask(inputs, 5);
  EXPECT_TRUE(block_mask.indices().empty());
  EXPECT_EQ(block_mask.indptr().size(), 1U + 2U + 2U);
  inputs.sequences.clear();
  inputs.q.clear();
  inputs.k.clear();
  EXPECT_EQ(top_k_block_mask(inputs, 5).indptr().size(), 1U);
}

TEST(TopKSelection, RefuseWhatTheyCantBe) {
  AttentionInputs inputs = random_inputs(make_spec(Dtype::kBf16, 4, 2, 8, {-1, 0}), {{64, 64, 0}}, 3);
  inputs.spec.block_mask = {16, 16, 1};
  EXPECT_EQ(error_of([&] { top_k_block_mask(inputs, 0); }).code(), ErrorCode::kUsage);
  for (const BlockMaskShape& shape :
       {BlockMaskShape{16, 16, 3}, BlockMaskShape{16, 0, 1}, BlockMaskShape{0, 16, 1}, BlockMaskShape{16, 16, 0}}) {
    inputs.spec.block_mask = shape;
    EXPECT_EQ(error_of([&] { top_k_block_mask(inputs, 2); }).code(), ErrorCode::kUsage) << shape.heads;
  }
  inputs.spec.block_mask = {16, 16, 1};
  const auto host = cpu::make_cpu_backend({1, 0});
  const std::vector<MaskedSequence> sequences = inputs.masked_sequences();
  const auto with_rows = [&](const TensorView& q, const TensorView& k) {
    return error_of([&] { top_k_selection(inputs.spec, sequences, 2, packed_rows(sequences, q, k), *host, {}); })
        .code();
  };
  const TensorView q = inputs.q_view(0);
  const TensorView k = inputs.k_view(0);
  TensorView wrong = k;
  wrong.tokens = 63;
  EXPECT_EQ(with_rows(q, wrong), ErrorCode::kUsage);
  wrong = k;
  wrong.dtype = Dtype::kF16;
  EXPECT_EQ(with_rows(q, wrong), ErrorCode::kUsage);
  EXPECT_EQ(with_rows(k, k), ErrorCode::kUsage);
  wrong = q;
  wrong.dim = 4;
  EXPECT_EQ(with_rows(wrong, k), ErrorCode::kUsage);
}

}  // namespace
}  // namespace ringattn::testing
