// SPDX-License-Identifier: Apache-2.0
// Low rank of groups of heads: the bytes of low rank of the same rows with a group's heads as one.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/registry.hpp"
#include "kernels/quant/compression_methods.hpp"
#include "kernels/quant/low_rank.hpp"
#include "kernels/quant/staged_rows.hpp"
#include "kernels/quant/tensor_compression.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

class HeadGroups : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_low_rank()) GTEST_SKIP() << "skipped: needs Eigen";
  }
};

RowFormat low_rank(int rank, int heads = 1) {
  return {.encoding = RowEncoding::kLowRank, .rank = rank, .heads = heads};
}

struct GroupCase {
  Dtype dtype;
  std::int64_t heads, dim;
  int group, rank;
};
constexpr GroupCase kCases[] = {{Dtype::kBf16, 4, 64, 2, 24},
                                {Dtype::kF16, 6, 40, 3, 16},
                                {Dtype::kBf16, 2, 128, 2, 200},
                                {Dtype::kF16, 3, 64, 3, 104},
                                {Dtype::kBf16, 8, 64, 8, 8}};

TEST_F(HeadGroups, AreStoredAsOneWideHead) {
  const std::vector<std::int64_t> lengths{0, 1, 31, 100, 77};
  for (const GroupCase& c : kCases) {
    SCOPED_TRACE(std::to_string(c.heads) + " heads of " + std::to_string(c.dim) + " by " + std::to_string(c.group));
    const RowShape shape{c.dtype, c.heads, c.dim}, wide{c.dtype, c.heads / c.group, c.dim * c.group};
    const std::vector<std::byte> rows = outlier_rows(shape, lengths, 1);
    CompressedTensor tensor =
        compress_tensor("k", low_rank(c.rank, c.group), view_of(rows, shape, 209), lengths, {0, 2}, ErrorCode::kFile);
    CompressedTensor of_wide =
        compress_tensor("k", low_rank(c.rank), view_of(rows, wide, 209), lengths, {0, 2}, ErrorCode::kFile);
    EXPECT_TRUE(tensor.streams == of_wide.streams);
    EXPECT_TRUE(tensor.tables == of_wide.tables);
    EXPECT_EQ(tensor.energy_kept, of_wide.energy_kept);
    EXPECT_TRUE(decompress_tensor(tensor, 2) == decompress_tensor(of_wide, 1));
    EXPECT_EQ(format_streams(tensor.format, shape)[0].heads, c.heads / c.group);
    EXPECT_EQ(format_tables(tensor.format, shape, 1)[0].shape,
              (std::vector<std::int64_t>{c.heads / c.group, c.rank, c.group * c.dim}));
  }
}

// More tokens than a piece has, on every backend that is here.
TEST_F(HeadGroups, BackendsMakeTheSameBytesPiecewise) {
  const RowShape shape{Dtype::kF16, 2, 32};
  const std::vector<std::int64_t> lengths{40, kStagedTokens + 77};
  const std::vector<std::byte> rows = outlier_rows(shape, lengths, 2);
  const TensorView view = view_of(rows, shape, lengths[0] + lengths[1]);
  CompressedTensor expected = compress_tensor("k", low_rank(16, 2), view, lengths, {0, 2}, ErrorCode::kFile);
  for (const std::string backend : {"cpu", "cuda"}) {
    std::unique_ptr<Backend> made;
    for (const OpKernel& kernel : all_kernels()) {
      if (kernel.row->backend == backend && kernel.row->unavailable().empty() && made == nullptr) {
        made = kernel.row->make_backend({2, 0});
      }
    }
    if (made == nullptr) continue;
    const CompressedTensor tensor =
        compress_tensor("k", low_rank(16, 2), view, lengths, {0, 2, made.get()}, ErrorCode::kFile);
    EXPECT_TRUE(tensor.streams == expected.streams) << backend;
    EXPECT_TRUE(tensor.tables == expected.tables) << backend;
    EXPECT_TRUE(decompress_tensor(expected, 2, made.get()) == decompress_tensor(expected, 2)) << backend;
  }
}

// Heads that are stored one after another, [heads, tokens, dim], as input and as output.
TEST_F(HeadGroups, WhereHeadsLieMovesNoBit) {
  const RowShape shape{Dtype::kBf16, 4, 40};
  constexpr std::int64_t kTokens = 90;
  const std::vector<std::byte> rows = outlier_rows(shape, std::vector<std::int64_t>{kTokens}, 3);
  const RowFormat format = low_rank(16, 2);
  CompressedTensor expected =
      compress_tensor("k", format, view_of(rows, shape, kTokens), {{kTokens}}, {0, 1}, ErrorCode::kFile);
  std::vector<std::byte> apart(rows.size());
  const MutableTensorView view{apart.data(), shape.dtype, kTokens, 4, 40, 40, kTokens * 40};
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t h = 0; h < 4; ++h) std::memcpy(view.at(t, h), rows.data() + (t * 4 + h) * 80, 80);
  }
  CompressedTensor tensor = make_compressed(format, shape, {kTokens});
  TensorCodec coder(format, shape, {2, kNoDevice});
  const double kept = coder.compress("k", view, tensor.runs(), tensor.rows(), ErrorCode::kFile);
  EXPECT_EQ(kept, expected.energy_kept);
  EXPECT_TRUE(tensor.streams == expected.streams);
  EXPECT_TRUE(tensor.tables == expected.tables);
  const std::vector<std::byte> back = decompress_tensor(expected, 1);
  coder.decompress_checked("k", tensor.rows(), tensor.runs(), view, ErrorCode::kFile);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t h = 0; h < 4; ++h) ASSERT_EQ(std::memcmp(view.at(t, h), back.data() + (t * 4 + h) * 80, 80), 0);
  }
}

// Heads that are alike are stored once.
TEST_F(HeadGroups, HeadsThatAreAlikeShareTheirRank) {
  const RowShape shape{Dtype::kF16, 2, 64};
  std::vector<std::byte> rows = outlier_rows(shape, std::vector<std::int64_t>{300}, 4);
  for (std::size_t t = 0; t < 300; ++t) std::memcpy(rows.data() + t * 256 + 128, rows.data() + t * 256, 128);
  const auto kept = [&](const RowFormat& format) {
    return compress_tensor("k", format, view_of(rows, shape, 300), {{300}}, {0, 2}, ErrorCode::kFile).energy_kept;
  };
  EXPECT_NEAR(kept(low_rank(24, 2)), kept(low_rank(24)), 1e-3);  // in half of the bytes
}

TEST_F(HeadGroups, InvalidEntriesAreNamedWhereTheyAre) {
  const RowShape shape{Dtype::kBf16, 4, 64};
  const std::vector<std::byte> rows = outlier_rows(shape, std::vector<std::int64_t>{50}, 5);
  const CompressedTensor good =
      compress_tensor("k", low_rank(24, 2), view_of(rows, shape, 50), {{50}}, {0, 2}, ErrorCode::kFile);
  std::vector<std::byte> elements(rows.size());
  const auto text = [&](CompressedTensor tensor, const auto& change) {
    change(tensor);
    return std::string(error_of([&] {
                         TensorCodec(tensor.format, shape, {1, kNoDevice})
                             .decompress_checked(
                                 "k", tensor.rows(), tensor.runs(),
                                 dense_view(static_cast<void*>(elements.data()), shape.dtype, 50, 4, 64),
                                 ErrorCode::kFile);
                       }).what());
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto factor = [&](CompressedTensor& tensor, std::size_t token, std::size_t group, std::size_t r, float value) {
    store_element(tensor.streams[0].data() + 2 * ((token * 2 + group) * 24 + r), shape.dtype, value);
  };
  EXPECT_EQ(text(good, [&](CompressedTensor& tensor) { factor(tensor, 17, 1, 5, nan); })
                .rfind("k_factors[17, 1, 5] is nan", 0),
            0U);
  EXPECT_EQ(text(good,
                 [&](CompressedTensor& tensor) {
                   store_element(tensor.tables[0].data() + 2 * ((1 * 24 + 3) * 128 + 100), shape.dtype, nan);
                 })
                .rfind("k_basis[1, 3, 100] is nan", 0),
            0U);
  // Channel 100 of the second group's rows is channel 36 of its second head.
  const std::string product = text(good, [&](CompressedTensor& tensor) {
    factor(tensor, 17, 1, 5, 3e38F);
    store_element(tensor.tables[0].data() + 2 * ((1 * 24 + 5) * 128 + 100), shape.dtype, 30.0F);
  });
  EXPECT_EQ(product.rfind("k[17, 3, 36] is ", 0), 0U) << product;

  std::vector<std::byte> broken = rows;
  store_element(broken.data() + 2 * ((17 * 4 + 3) * 64 + 9), shape.dtype, nan);
  const std::string plain =
      error_of([&] {
        compress_tensor("k", low_rank(24, 2), view_of(broken, shape, 50), {{50}}, {0, 2}, ErrorCode::kFile);
      }).what();
  EXPECT_EQ(plain.rfind("k[17, 3, 9] is nan", 0), 0U) << plain;
}

TEST(HeadGroupFormat, TextAndRefusals) {
  EXPECT_EQ(describe(low_rank(64, 4)), "low_rank rank 64 heads 4");
  EXPECT_EQ(parse_row_format("low_rank rank 64 heads 4"), low_rank(64, 4));
  EXPECT_EQ(parse_row_format("low_rank rank 64 heads 1"), low_rank(64));
  EXPECT_EQ(describe(low_rank(64)), "low_rank rank 64");
  for (const char* const text : {"low_rank rank 64 heads", "low_rank heads 2 rank 64", "low_rank rank 64 heads x",
                                 "low_rank rank 64 heads 2 2", "hybrid rank 8 group 32 outliers 4 heads 2"}) {
    EXPECT_EQ(error_of([&] { parse_row_format(text); }).code(), ErrorCode::kUsage) << text;
  }
  const RowShape shape{Dtype::kBf16, 8, 128};
  EXPECT_EQ(token_bytes(low_rank(64, 4), shape), 2 * 2 * 64);
  EXPECT_EQ(table_bytes(low_rank(64, 4), shape, 3), 2 * 64 * 512 * 2);
  const auto refused = [&](const RowFormat& format) {
    return std::string(error_of([&] { check_format("k", format, shape); }).what());
  };
  EXPECT_NE(refused(low_rank(64, 3)).find("groups of 3 of 8 heads (supported: divisors)"), std::string::npos);
  EXPECT_NE(refused(low_rank(64, 16)).find("groups of 16 of 8 heads"), std::string::npos);
  EXPECT_NE(refused(low_rank(64, 0)).find("groups of 0 of 8 heads"), std::string::npos);
  EXPECT_NE(refused(low_rank(64, -2)).find("groups of -2 of 8 heads"), std::string::npos);
  EXPECT_NE(refused(low_rank(256, 2)).find("rank 256 of a dim of 256"), std::string::npos);
  EXPECT_NO_THROW(check_format("k", low_rank(248, 2), shape));
}

TEST(HeadGroupFormat, MethodsNameTheHeads) {
  const RowShape shape{Dtype::kBf16, 8, 128};
  const auto chosen = [&](const char* text, std::optional<double> ratio) {
    return describe(choose_format(parse_format_choice(text), ratio, shape, shape));
  };
  EXPECT_EQ(chosen("lowrank:heads=2", std::nullopt), "low_rank rank 64 heads 2");  // a quarter, as of one head
  EXPECT_EQ(chosen("lowrank:heads=2", 0.5), "low_rank rank 128 heads 2");
  EXPECT_EQ(chosen("lowrank:heads=8", 0.75), "low_rank rank 256 heads 8");
  EXPECT_EQ(chosen("lowrank:heads=1", std::nullopt), "low_rank rank 32");
  EXPECT_EQ(chosen("low_rank rank 40 heads 4", std::nullopt), "low_rank rank 40 heads 4");
  EXPECT_TRUE(parse_cache_method("snapkv:window=8+lowrank:heads=2").format);
  const auto refused = [&](const char* text) {
    return std::string(error_of([&] { chosen(text, std::nullopt); }).what());
  };
  EXPECT_NE(refused("lowrank:heads=3").find("groups of 3 of 8 heads"), std::string::npos);
  // Must be refused at once: trying ranks for this many heads would take hours and exceed memory.
  EXPECT_NE(refused("lowrank:heads=2147483647").find("groups of 2147483647 of 8 heads"), std::string::npos);
  EXPECT_NE(refused("lowrank:heads=0").find("\"heads=0\" is not an option of lowrank"), std::string::npos);
  EXPECT_NE(refused("lowrank:rank=8").find("\"rank=8\" is not an option of lowrank"), std::string::npos);
  EXPECT_NE(refused("lowrank:").find("\"\" is not an option of lowrank"), std::string::npos);
  EXPECT_NE(refused("int4:heads=2").find("\"heads=2\" is not an option of int4"), std::string::npos);
  for (const auto& [heads, dim] : std::vector<std::pair<int, std::int64_t>>{
           {-2, 64}, {0, 64}, {2, 0}, {2, -64}, {2, 2147483640}, {2147483647, 8}}) {
    const RowShape odd{Dtype::kBf16, heads, dim};
    for (const char* const text : {"int4", "lowrank", "lowrank:heads=2"}) {
      const Error error = error_of([&] { choose_format(parse_format_choice(text), 0.5, odd, odd); });
      EXPECT_NE(std::string(error.what()).find("heads and dims are 1 to 65536"), std::string::npos) << error.what();
    }
  }
  const RowShape many{Dtype::kBf16, 65536, 65536};
  EXPECT_EQ(describe(choose_format(parse_format_choice("lowrank:heads=65536"), 0.9999, many, many).k),
            "low_rank rank 65528 heads 65536");
  for (const double ratio : {-1.0, -1e-9, std::numeric_limits<double>::quiet_NaN()}) {
    const Error error = error_of([&] { chosen("int4", ratio); });
    EXPECT_NE(std::string(error.what()).find("the ratio is the share"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace ringattn::testing
