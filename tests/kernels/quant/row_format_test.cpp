// SPDX-License-Identifier: Apache-2.0
// The table of formats: what each holds of a token, its text both ways, and the shapes that it refuses.
#include "kernels/quant/row_format.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/support/compressed_tensors.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr RowShape kShape{Dtype::kBf16, 8, 128};

TEST(RowFormat, EveryCodingIsARow) {
  std::set<RowEncoding> encodings{RowEncoding::kPlain};
  for (const RowFormat& format : every_format()) encodings.insert(format.encoding);
  for (const RowEncodingEntry& entry : row_encodings()) {
    EXPECT_EQ(entry_of(entry.encoding).name, entry.name);
    // Latents are of other dims.
    if (entry.encoding != RowEncoding::kLowRank && entry.encoding != RowEncoding::kHybrid &&
        entry.encoding != RowEncoding::kLatent) {
      EXPECT_TRUE(encodings.contains(entry.encoding)) << entry.name;
    }
  }
}

TEST(RowFormat, TextIsReadAsItIsWritten) {
  EXPECT_EQ(describe(RowFormat{}), "plain");
  EXPECT_EQ(describe(RowFormat{RowEncoding::kHybrid, ScaleGrain::kTokenHead, 32, 16, 0, 4}),
            "hybrid rank 16 group 32 outliers 4");
  EXPECT_EQ(describe(RowFormat{RowEncoding::kFp8, ScaleGrain::kHead}), "fp8 head");
  for (const RowFormat& format : every_format()) EXPECT_EQ(parse_row_format(describe(format)), format);
  EXPECT_EQ(parse_row_format("latent rope 64"), (RowFormat{.encoding = RowEncoding::kLatent, .rope = 64}));
  EXPECT_EQ(describe(RowFormat{.encoding = RowEncoding::kLatent, .rope = 64}), "latent rope 64");
  EXPECT_EQ(parse_row_format("plain"), RowFormat{});
}

TEST(RowFormat, OtherTextIsRefused) {
  for (const char* const text : {"", "int3", "fp8", "fp8 row", "int4_channel", "int4_channel group", "low_rank rank x",
                                 "low_rank rank 8 9", "int8 group 32", "vector width 4x", "int4_token  group 32"}) {
    const Error error = error_of([&] { parse_row_format(text); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("is not a storage format"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("int4_channel, int4_token"), std::string::npos) << error.what();
  }
}

// Bytes of a token of 8 heads of 128, which are 2,048 as they are.
TEST(RowFormat, BytesOfAToken) {
  const auto bytes = [](const char* text) { return token_bytes(parse_row_format(text), kShape); };
  EXPECT_EQ(bytes("plain"), 8 * 256);
  EXPECT_EQ(bytes("fp8 tensor"), 8 * 128);
  EXPECT_EQ(token_bytes(parse_row_format("latent rope 64"), {Dtype::kBf16, 1, 576}), 656);
  EXPECT_EQ(bytes("fp8 token_head"), 8 * (128 + 4));
  EXPECT_EQ(bytes("int8"), 8 * (128 + 4));
  EXPECT_EQ(bytes("int4_channel group 32"), 8 * (64 + 16));
  EXPECT_EQ(bytes("int4_channel group 64"), 8 * (64 + 8));
  EXPECT_EQ(bytes("int4_token group 32"), 8 * (64 + 16));
  EXPECT_EQ(bytes("low_rank rank 32"), 8 * 64);
  EXPECT_EQ(bytes("vector width 4"), 8 * 32);
  EXPECT_EQ(bytes("hybrid rank 16 group 32 outliers 4"), 8 * (32 + 64 + 16 + 8));
  EXPECT_EQ(table_bytes(parse_row_format("fp8 head"), kShape, 3), 32);
  EXPECT_EQ(table_bytes(parse_row_format("int4_channel group 32"), kShape, 3), 3 * 32 * 2048);
  EXPECT_EQ(table_bytes(parse_row_format("vector width 4"), kShape, 3), 256 * 2048);
}

TEST(RowFormat, StreamsAndTablesHaveRoom) {
  for (const RowFormat& format : every_format()) {
    EXPECT_LE(format_streams(format, kShape).size(), static_cast<std::size_t>(kMaxStreams)) << describe(format);
    EXPECT_LE(format_tables(format, kShape, 2).size(), static_cast<std::size_t>(kMaxTables)) << describe(format);
    for (const FormatStream& stream : format_streams(format, kShape)) EXPECT_EQ(stream.heads, kShape.heads);
  }
}

TEST(RowFormat, ShapesThatDoNotFitAreRefused) {
  const auto refused = [](const char* text, const RowShape& shape) {
    return std::string(error_of([&] { check_format("k", parse_row_format(text), shape); }).what());
  };
  EXPECT_EQ(
      refused("int4_channel group 48", kShape),
      "k of 8 heads of 128 can't be stored as int4_channel group 48 (groups of 48 tokens (supported: 32 and 64); "
      "groups of 48 in a dim of 128 (supported: divisors)). Choose another format, or another rank, group or dtype.");
  EXPECT_NE(refused("int4_token group 32", {Dtype::kBf16, 2, 80}).find("groups of 32 in a dim of 80"),
            std::string::npos);
  EXPECT_NE(refused("low_rank rank 128", kShape).find("rank 128 of a dim of 128"), std::string::npos);
  EXPECT_NE(refused("low_rank rank 12", kShape).find("multiples of 8"), std::string::npos);
  EXPECT_NE(refused("vector width 3", kShape).find("vectors of 3 channels"), std::string::npos);
  EXPECT_NE(refused("hybrid rank 8 group 32 outliers 3", kShape).find("3 outlier channels"), std::string::npos);
  EXPECT_NE(refused("int8", {Dtype::kF32, 2, 64}).find("fp32 (supported: bf16 and fp16)"), std::string::npos);
  EXPECT_NO_THROW(check_format("k", {}, {Dtype::kF32, 2, 64}));
}

}  // namespace
}  // namespace ringattn::testing
