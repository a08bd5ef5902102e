// SPDX-License-Identifier: Apache-2.0
// What the tables of formats are found by: Gram matrices of channels, directions, outlier channels and codebooks, by
// their words and one number at a time.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/quant/codebook.hpp"
#include "kernels/quant/gram.hpp"
#include "kernels/quant/low_rank.hpp"
#include "kernels/quant/low_rank_codec.hpp"
#include "kernels/quant/row_quantization.hpp"
#include "kernels/quant/tensor_compression.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

float element(const TensorView& rows, std::int64_t token, std::int64_t head, std::int64_t channel) {
  return load_element(rows.at(token, head) + channel * 2, rows.dtype);
}

std::vector<double> gram_of(const TensorView& rows, int threads = 1) {
  std::vector<double> sums(static_cast<std::size_t>(rows.heads * rows.dim * rows.dim));
  add_gram_on_host({rows, sums.data()}, threads);
  return sums;
}

// Sums on and above the diagonal, bit for bit.
void expect_same_sums(const std::vector<double>& got, const std::vector<double>& expected, const RowShape& shape) {
  for (std::int64_t head = 0; head < shape.heads; ++head) {
    for (std::int64_t i = 0; i < shape.dim; ++i) {
      const auto at = static_cast<std::size_t>((head * shape.dim + i) * shape.dim);
      ASSERT_EQ(std::memcmp(got.data() + at + i, expected.data() + at + i,
                            static_cast<std::size_t>(shape.dim - i) * sizeof(double)),
                0)
          << "head " << head << ", channel " << i << " of " << shape.dim;
    }
  }
}

TEST(Gram, IsOneChainOverTheTokens) {
  for (const RowShape& shape : {RowShape{Dtype::kBf16, 2, 64},
                                {Dtype::kF16, 1, 8},
                                {Dtype::kBf16, 3, 72},
                                {Dtype::kF16, 1, 192},
                                {Dtype::kBf16, 1, 256}}) {
    for (const std::int64_t tokens : {1, 63, 64, 65, 200}) {
      const std::vector<std::byte> bytes = outlier_rows(shape, std::vector<std::int64_t>{tokens}, 3);
      const TensorView rows = view_of(bytes, shape, tokens);
      std::vector<double> expected(static_cast<std::size_t>(shape.heads * shape.dim * shape.dim));
      for (std::int64_t head = 0; head < shape.heads; ++head) {
        for (std::int64_t i = 0; i < shape.dim; ++i) {
          for (std::int64_t j = i; j < shape.dim; ++j) {
            double& sum = expected[static_cast<std::size_t>((head * shape.dim + i) * shape.dim + j)];
            for (std::int64_t t = 0; t < tokens; ++t) {
              sum += static_cast<double>(element(rows, t, head, i)) * static_cast<double>(element(rows, t, head, j));
            }
          }
        }
      }
      expect_same_sums(gram_of(rows), expected, shape);
      expect_same_sums(gram_of(rows, 3), expected, shape);
    }
  }
}

// The Gram matrix of some heads of wider rows, accumulated in pieces of any length.
TEST(Gram, PiecesAndStridesMoveNoBit) {
  const RowShape shape{Dtype::kF16, 2, 40}, wide{Dtype::kF16, 5, 40};
  constexpr std::int64_t kTokens = 5000;
  const std::vector<std::byte> bytes = outlier_rows(wide, std::vector<std::int64_t>{kTokens}, 4);
  const TensorView rows{bytes.data() + 2 * 40, Dtype::kF16, kTokens, 2, 40, 200, 80};
  const std::vector<double> whole = gram_of(rows);
  std::vector<double> pieces(whole.size());
  for (std::int64_t first = 0, count = 1; first < kTokens; first += count, count = 3 * count + 1) {
    TensorView some = rows;
    some.data = rows.at(first, 0);
    some.tokens = std::min(count, kTokens - first);
    add_gram_on_host({some, pieces.data()}, 2);
  }
  expect_same_sums(pieces, whole, shape);
}

TEST(Gram, OnlyFiniteRowsHaveAFiniteDiagonal) {
  const RowShape shape{Dtype::kBf16, 2, 64};
  std::vector<std::byte> bytes = outlier_rows(shape, std::vector<std::int64_t>{90}, 5);
  for (std::size_t i = 0; i < 64; ++i) store_element(bytes.data() + 2 * i, shape.dtype, 3e38F);
  EXPECT_TRUE(has_finite_rows(shape, gram_of(view_of(bytes, shape, 90))));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    std::vector<std::byte> broken = bytes;
    store_element(broken.data() + 2 * ((89 * 2 + 1) * 64 + 63), shape.dtype, bad);
    EXPECT_FALSE(has_finite_rows(shape, gram_of(view_of(broken, shape, 90))));
  }
}

TEST(LowRankTables, DirectionsAreOrthonormalAndOutliersTheGreatest) {
  if (!has_low_rank()) GTEST_SKIP() << "skipped: needs Eigen";
  const RowShape shape{Dtype::kF16, 2, 64};
  const RowFormat format{RowEncoding::kHybrid, ScaleGrain::kTokenHead, 32, 16, 0, 4};
  std::vector<std::byte> bytes = outlier_rows(shape, std::vector<std::int64_t>{300}, 6);
  constexpr std::int32_t kChannels[] = {0, 17, 40, 63};
  for (std::int64_t t = 0; t < 600; ++t) {
    for (const std::int32_t c : kChannels) store_element(bytes.data() + 2 * (t * 64 + c), shape.dtype, 90.0F);
  }
  const std::vector<double> gram = gram_of(view_of(bytes, shape, 300));
  const LowRankTables tables = find_low_rank_tables(format, shape, gram, 2);
  EXPECT_TRUE(std::ranges::equal(std::span(tables.outliers).first(4), kChannels));
  EXPECT_TRUE(std::ranges::equal(std::span(tables.outliers).last(4), kChannels));
  EXPECT_TRUE(tables.bounded);
  const auto direction = [&](std::int64_t head, std::int64_t r, std::int64_t c) {
    return load_element(tables.basis.data() + 2 * ((head * 16 + r) * 64 + c), shape.dtype);
  };
  for (std::int64_t head = 0; head < 2; ++head) {
    for (std::int64_t r = 0; r < 16; ++r) {
      float greatest = 0.0F;
      for (std::int64_t c = 0; c < 64; ++c) {
        if (std::abs(direction(head, r, c)) > std::abs(greatest)) greatest = direction(head, r, c);
      }
      EXPECT_GT(greatest, 0.0F);
      for (const std::int32_t c : kChannels) EXPECT_EQ(direction(head, r, c), 0.0F);
      for (std::int64_t other = 0; other <= r; ++other) {
        float sum = 0.0F;
        for (std::int64_t c = 0; c < 64; ++c) sum += direction(head, r, c) * direction(head, other, c);
        EXPECT_NEAR(sum, r == other ? 1.0F : 0.0F, 2e-3F) << r << ", " << other;
      }
    }
  }
  // Rows that lie in the directions keep all of their energy.
  EXPECT_GT(tables.energy_kept, 0.9);
  EXPECT_LT(tables.energy_kept, 1.001);
}

// Fewer tokens than directions, one of them, none.
TEST(LowRankTables, OfFewTokens) {
  if (!has_low_rank()) GTEST_SKIP() << "skipped: needs Eigen";
  const RowShape shape{Dtype::kBf16, 1, 64};
  for (const char* const text : {"low_rank rank 24", "hybrid rank 24 group 32 outliers 4"}) {
    for (const std::int64_t tokens : {0, 1, 2, 23}) {
      const std::vector<std::byte> rows = outlier_rows(shape, std::vector<std::int64_t>{tokens}, 7);
      CompressedTensor tensor = compress_tensor("k", parse_row_format(text), view_of(rows, shape, tokens), {{tokens}},
                                                {0, 2}, ErrorCode::kFile);
      EXPECT_GT(tensor.energy_kept, 0.999) << text << ", " << tokens;
      const std::vector<std::byte> back = decompress_tensor(tensor, 1);
      for (std::size_t i = 0; i < back.size(); i += 2) {
        const float before = load_element(rows.data() + i, shape.dtype);
        ASSERT_NEAR(load_element(back.data() + i, shape.dtype), before, 0.02F * std::abs(before) + 0.3F)
            << text << ", " << tokens;
      }
    }
  }
}

// Factors and products are looked at where they may be more than the dtype holds.
TEST(LowRankTables, WhatCannotBeHeldIsNamed) {
  if (!has_low_rank()) GTEST_SKIP() << "skipped: needs Eigen";
  const RowShape shape{Dtype::kF16, 1, 64};
  std::vector<std::byte> rows(2 * 64 * 40);
  for (std::size_t i = 0; i < 64 * 40; ++i) store_element(rows.data() + 2 * i, shape.dtype, 65504.0F);
  const auto text = [&](const char* format) {
    return std::string(
        error_of([&] {
          compress_tensor("k", parse_row_format(format), view_of(rows, shape, 40), {{40}}, {0, 2}, ErrorCode::kFile);
        }).what());
  };
  EXPECT_EQ(text("low_rank rank 8").rfind("k_factors[0, 0, 0] is inf", 0), 0U) << text("low_rank rank 8");
  EXPECT_EQ(text("hybrid rank 8 group 32 outliers 2").rfind("k_factors[0, 0, 0] is inf", 0), 0U);
  // Only one channel: its factor fits.
  for (std::size_t i = 0; i < 64 * 40; ++i) {
    store_element(rows.data() + 2 * i, shape.dtype, i % 64 == 5 ? 65504.0F : 0.0F);
  }
  const CompressedTensor fits = compress_tensor("k", parse_row_format("low_rank rank 8"), view_of(rows, shape, 40),
                                                {{40}}, {0, 1}, ErrorCode::kFile);
  EXPECT_EQ(load_element(fits.streams[0].data(), shape.dtype), 65504.0F);
}

// k-means as its words say it.
std::vector<std::byte> codebook_by_words(const TensorView& rows, std::int64_t width, std::uint64_t seed) {
  const std::int64_t runs = rows.dim / width, count = codebook_points(rows.tokens);
  std::vector<std::byte> book(static_cast<std::size_t>(rows.heads * rows.dim * kCodebookVectors * 2));
  for (std::int64_t stream = 0; stream < rows.heads * runs; ++stream) {
    const auto number = [&](std::int64_t i, std::int64_t c) {
      return element(rows, codebook_token(i, count, rows.tokens), stream / runs, stream % runs * width + c);
    };
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < count; ++i) order.push_back(i);
    for (int i = 0; i < std::min<std::int64_t>(count, kCodebookVectors); ++i) {
      const int other = codebook_draw(i, static_cast<int>(count), static_cast<std::uint32_t>(stream), seed);
      std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(other)]);
    }
    std::vector<float> vectors(static_cast<std::size_t>(kCodebookVectors * width));
    for (std::int64_t v = 0; v < kCodebookVectors && count > 0; ++v) {
      for (std::int64_t c = 0; c < width; ++c) {
        vectors[static_cast<std::size_t>(v * width + c)] = number(order[static_cast<std::size_t>(v % count)], c);
      }
    }
    for (int round = 0; round < kKMeansIterations; ++round) {
      std::vector<double> sums(vectors.size());
      std::vector<int> points(kCodebookVectors);
      for (std::int64_t i = 0; i < count; ++i) {
        std::vector<float> point;
        for (std::int64_t c = 0; c < width; ++c) point.push_back(number(i, c));
        int nearest = 0;
        float least = std::numeric_limits<float>::infinity();
        for (int v = 0; v < kCodebookVectors; ++v) {
          const float distance = squared_distance(point.data(), vectors.data() + v * width, static_cast<int>(width));
          if (distance < least) nearest = v, least = distance;
        }
        ++points[static_cast<std::size_t>(nearest)];
        for (std::int64_t c = 0; c < width; ++c) {
          sums[static_cast<std::size_t>(nearest * width + c)] +=
              static_cast<double>(point[static_cast<std::size_t>(c)]);
        }
      }
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const int of_vector = points[i / static_cast<std::size_t>(width)];
        if (of_vector > 0) vectors[i] = static_cast<float>(sums[i] / of_vector);
      }
    }
    for (std::size_t i = 0; i < vectors.size(); ++i) {
      store_element(book.data() + (static_cast<std::size_t>(stream) * vectors.size() + i) * 2, rows.dtype, vectors[i]);
    }
  }
  return book;
}

TEST(Codebooks, AreThoseOfTheWords) {
  for (const std::int64_t width : {2, 4, 8}) {
    for (const std::int64_t tokens : {0, 1, 255, 300, 8500}) {
      if (tokens > 1000 && width != 8) continue;  // which is slow
      const RowShape shape{tokens % 2 == 0 ? Dtype::kBf16 : Dtype::kF16, 1, 16};
      const std::vector<std::byte> rows = outlier_rows(shape, std::vector<std::int64_t>{tokens}, 8);
      const TensorView view = view_of(rows, shape, tokens);
      std::vector<std::byte> book(16 * kCodebookVectors * 2);
      find_codebook_on_host({view, width, 9, book.data()}, 2);
      EXPECT_TRUE(book == codebook_by_words(view, width, 9)) << width << ", " << tokens;
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
