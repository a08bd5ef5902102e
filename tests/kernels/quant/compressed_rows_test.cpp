// SPDX-License-Identifier: Apache-2.0
// Compressed tensors are the tensors that their layout says, whichever way they are decompressed, and what none may
// hold is found and named.
#include "kernels/quant/compressed_rows.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/e4m3.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/quant/row_quantization.hpp"
#include "kernels/quant/staged_rows.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

const std::vector<std::int64_t> kLengths{0, 1, 31, 32, 33, 64, 100, 200, 63};

CompressedTensor compressed(const RowFormat& format, const RowShape& shape, const std::vector<std::byte>& rows,
                            const std::vector<std::int64_t>& lengths = kLengths, int threads = 1) {
  const std::int64_t tokens = static_cast<std::int64_t>(rows.size() / size_of(shape.dtype)) / shape.heads / shape.dim;
  return compress_tensor("k", format, view_of(rows, shape, tokens), lengths, {7, threads}, ErrorCode::kFile);
}

class CompressedRowsTest : public ::testing::TestWithParam<RowFormat> {
 protected:
  const RowFormat& format() const { return GetParam(); }
};

TEST_P(CompressedRowsTest, ThreadsMakeTheSameBytes) {
  const RowShape shape{Dtype::kBf16, 3, 64};
  const std::vector<std::byte> rows = outlier_rows(shape, kLengths, 1);
  CompressedTensor one = compressed(format(), shape, rows);
  CompressedTensor three = compressed(format(), shape, rows, kLengths, 3);
  EXPECT_EQ(one.streams, three.streams);
  EXPECT_EQ(one.tables, three.tables);
  EXPECT_EQ(decompress_tensor(one, 1), decompress_tensor(one, 3));
}

// Dims that are no multiple of a vector: rows have the bytes of rows with zeros behind them.
TEST_P(CompressedRowsTest, DimsOfAnySizeAreElementwise) {
  if (format().encoding != RowEncoding::kFp8 && format().encoding != RowEncoding::kInt8) {
    GTEST_SKIP() << "others need groups of channels";
  }
  const RowShape whole{Dtype::kBf16, 3, 136};
  const std::vector<std::byte> rows = outlier_rows(whole, kLengths, 4);
  for (const std::int64_t dim : {1, 37, 40, 130}) {
    const RowShape shape{whole.dtype, whole.heads, dim};
    const std::int64_t lines = std::accumulate(kLengths.begin(), kLengths.end(), std::int64_t{0}) * shape.heads;
    const auto bytes = static_cast<std::size_t>(2 * dim), whole_bytes = static_cast<std::size_t>(2 * whole.dim);
    std::vector<std::byte> padded(rows.size()), cut;
    for (std::size_t line = 0; line < static_cast<std::size_t>(lines); ++line) {
      const std::byte* const row = rows.data() + line * whole_bytes;
      cut.insert(cut.end(), row, row + bytes);
      std::copy_n(row, bytes, padded.data() + line * whole_bytes);
    }
    CompressedTensor of_cut = compressed(format(), shape, cut), of_padded = compressed(format(), whole, padded);
    const std::vector<std::byte> expected = decompress_tensor(of_padded, 1), got = decompress_tensor(of_cut, 1);
    for (std::size_t line = 0; line < static_cast<std::size_t>(lines); ++line) {
      ASSERT_EQ(std::memcmp(got.data() + line * bytes, expected.data() + line * whole_bytes, bytes), 0)
          << "dim " << dim << ", row " << line;
    }
  }
}

// Every backend that is here, some tokens at a time: a piece ends within the second sequence.
TEST_P(CompressedRowsTest, BackendsMakeTheSameBytesPiecewise) {
  const bool books = format().encoding == RowEncoding::kVector;  // which take their time
  if (books && format().width != 8) GTEST_SKIP() << "one width is enough";
  const RowShape shape{Dtype::kF16, books ? 1 : 2, 64};
  const std::vector<std::int64_t> lengths{40, kStagedTokens + 77, 0, 31};
  const std::vector<std::byte> rows = outlier_rows(shape, lengths, 5);
  const TensorView view = view_of(rows, shape, lengths[0] + lengths[1] + lengths[3]);
  CompressedTensor expected = compress_tensor("k", format(), view, lengths, {7, 2}, ErrorCode::kFile);
  const std::vector<std::byte> elements = decompress_tensor(expected, 2);
  std::set<std::string_view> seen;
  for (const OpKernel& kernel : all_kernels()) {
    if (!kernel.row->unavailable().empty() || !seen.insert(kernel.row->backend).second) continue;
    SCOPED_TRACE(kernel.row->backend);
    const std::unique_ptr<Backend> backend = kernel.row->make_backend({2, 0});
    CompressedTensor tensor = compress_tensor("k", format(), view, lengths, {7, 2, backend.get()}, ErrorCode::kFile);
    EXPECT_TRUE(tensor.streams == expected.streams);
    EXPECT_TRUE(tensor.tables == expected.tables);
    EXPECT_TRUE(decompress_tensor(tensor, 2, backend.get()) == elements);
    // In the second piece.
    std::vector<std::byte> broken = rows;
    const std::int64_t token = 40 + kStagedTokens + 3, head = shape.heads - 1;
    const auto at = static_cast<std::size_t>((token * shape.heads + head) * shape.dim + 5);
    store_element(broken.data() + at * 2, shape.dtype, std::numeric_limits<float>::quiet_NaN());
    const Error error = error_of([&] {
      compress_tensor("k", format(), view_of(broken, shape, view.tokens), lengths, {7, 2, backend.get()},
                      ErrorCode::kFile);
    });
    EXPECT_EQ(std::string(error.what()).find(fmt::format("k[{}, {}, 5] is nan", token, head)), 0U) << error.what();
  }
}

// Runs in any order and of any whole number of quantization groups, from rows that lie apart, to rows that lie apart.
TEST_P(CompressedRowsTest, RunsAndStridesMoveNoBit) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    const RowShape shape{dtype, 2, 128};
    const std::vector<std::byte> rows = outlier_rows(shape, kLengths, 2);
    CompressedTensor tensor = compressed(format(), shape, rows);
    const std::vector<std::byte> whole = decompress_tensor(tensor, 1);
    // Streams with 48 bytes after each row, and elements with a head too many.
    CompressedRows from = tensor.rows();
    std::vector<std::vector<std::byte>> padded;
    std::size_t at = 0;
    for (const FormatStream& stream : format_streams(format(), shape)) {
      const std::int64_t bytes = stream.token_bytes(dtype);
      padded.emplace_back(static_cast<std::size_t>(tensor.tokens() * (bytes + 48)), std::byte{0xff});
      for (std::int64_t t = 0; t < tensor.tokens(); ++t) {
        std::memcpy(padded.back().data() + t * (bytes + 48), tensor.streams[at].data() + t * bytes,
                    static_cast<std::size_t>(bytes));
      }
      from.streams[at] = {padded.back().data(), bytes + 48, bytes / stream.heads};
      ++at;
    }
    std::vector<CompressedRun> runs;
    for (const CompressedRun& run : tensor.runs()) {
      const std::int64_t piece = format().encoding == RowEncoding::kInt4Channel ? format().group : 17;
      for (std::int64_t first = 0; first < run.rows; first += piece) {
        runs.insert(runs.begin(), {run.sequence, first, run.keys, run.row + first, std::min(piece, run.rows - first),
                                   run.to + first});
      }
    }
    std::vector<std::byte> plain(static_cast<std::size_t>(tensor.tokens() * 3 * shape.dim) * 2);
    const MutableTensorView view{plain.data(), dtype, tensor.tokens(), 2, shape.dim, 3 * shape.dim, shape.dim};
    TensorCodec(format(), shape, {2, kNoDevice}).decompress(from, runs, view);
    for (std::int64_t t = 0; t < tensor.tokens(); ++t) {
      ASSERT_EQ(std::memcmp(view.at(t, 0), whole.data() + t * 512, 512), 0) << t;
    }
  }
}

// Formats without products, whose order of sums is a kernel's.
class QuantizedValuesTest : public ::testing::TestWithParam<RowFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, QuantizedValuesTest, ::testing::ValuesIn(quantized_formats()),
                         [](const auto& test) { return test_name(test.param); });

// Every element by the layout's words, one at a time.
TEST_P(QuantizedValuesTest, ElementsLieWhereTheLayoutSays) {
  const RowFormat& f = GetParam();
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    const RowShape shape{dtype, 2, 64};
    const std::vector<std::byte> rows = outlier_rows(shape, kLengths, 3);
    CompressedTensor tensor = compressed(f, shape, rows);
    const std::vector<std::byte> plain = decompress_tensor(tensor, 1);
    const auto number = [&](const std::vector<std::byte>& bytes, std::int64_t index) {
      return load_element(bytes.data() + 2 * index, dtype);
    };
    const auto fp32 = [](const std::vector<std::byte>& bytes, std::int64_t index) {
      return load_element(bytes.data() + 4 * index, Dtype::kF32);
    };
    const auto byte = [](const std::vector<std::byte>& bytes, std::int64_t index) {
      return std::to_integer<std::uint8_t>(bytes[static_cast<std::size_t>(index)]);
    };
    std::int64_t begin = 0;
    for (std::size_t s = 0; s < kLengths.size(); begin += kLengths[s++]) {
      for (std::int64_t t = 0; t < kLengths[s]; ++t) {
        for (std::int64_t i = 0; i < 2 * 64; ++i) {
          const std::int64_t head = i / 64, c = i % 64, row = begin + t;
          float expected = 0.0F;
          switch (f.encoding) {
            case RowEncoding::kFp8: {
              const float scale = f.scales == ScaleGrain::kTokenHead
                                      ? fp32(tensor.streams[1], row * 2 + head)
                                      : fp32(tensor.tables[0], f.scales == ScaleGrain::kHead ? head : 0);
              expected = e4m3_to_float(byte(tensor.streams[0], row * 128 + i)) * scale;
              break;
            }
            case RowEncoding::kInt8:
              expected = static_cast<float>(static_cast<std::int8_t>(byte(tensor.streams[0], row * 128 + i))) *
                         fp32(tensor.streams[1], row * 2 + head);
              break;
            case RowEncoding::kInt4Channel: {
              if (t >= kLengths[s] / f.group * f.group) {
                expected = number(tensor.tables[0],
                                  ((static_cast<std::int64_t>(s) * f.group + t % f.group) * 2 + head) * 64 + c);
                break;
              }
              const std::int64_t of_token = 64 / f.group;
              const std::int64_t pair = ((row - t % f.group + c / of_token) * 2 + head) * of_token + c % of_token;
              const int code = byte(tensor.streams[0], row * 64 + i / 2) >> (c % 2 * 4) & 15;
              expected = std::fma(static_cast<float>(code), number(tensor.streams[1], 2 * pair),
                                  number(tensor.streams[1], 2 * pair + 1));
              break;
            }
            case RowEncoding::kInt4Token: {
              const std::int64_t pair = (row * 2 + head) * 2 + c / 32;
              const int code = byte(tensor.streams[0], row * 64 + i / 2) >> (c % 2 * 4) & 15;
              expected = std::fma(static_cast<float>(code), number(tensor.streams[1], 2 * pair),
                                  number(tensor.streams[1], 2 * pair + 1));
              break;
            }
            case RowEncoding::kVector: {
              const std::int64_t run = c / f.width;
              const std::int64_t vector = byte(tensor.streams[0], (row * 2 + head) * (64 / f.width) + run);
              expected =
                  number(tensor.tables[0], ((head * (64 / f.width) + run) * 256 + vector) * f.width + c % f.width);
              break;
            }
            default:
              FAIL();
          }
          std::byte element[2];
          store_element(element, dtype, expected);
          ASSERT_EQ(std::memcmp(element, plain.data() + 2 * (row * 128 + i), 2), 0)
              << "sequence " << s << ", token " << t << ", head " << head << ", channel " << c;
        }
      }
    }
  }
}

// How far a tensor comes back, of normal values: a share of their root mean square that is some way above what each
// format gives, so that a wrong code or scale shows.
TEST_P(CompressedRowsTest, ComesBackNear) {
  const RowShape shape{Dtype::kBf16, 2, 128};
  const std::vector<std::int64_t> lengths{3000};
  const std::vector<std::byte> rows = outlier_rows(shape, lengths, 4);
  CompressedTensor tensor = compressed(format(), shape, rows, lengths, 2);
  const std::vector<std::byte> plain = decompress_tensor(tensor, 2);
  double error = 0.0, all = 0.0;
  for (std::size_t i = 0; i < plain.size(); i += 2) {
    const double before = load_element(rows.data() + i, shape.dtype);
    const double after = load_element(plain.data() + i, shape.dtype);
    error += (after - before) * (after - before);
    all += before * before;
  }
  const double share = std::sqrt(error / all);
  const auto limit = [&] {
    switch (format().encoding) {
      case RowEncoding::kFp8:
        return 0.04;
      case RowEncoding::kInt8:
        return 0.02;
      case RowEncoding::kInt4Channel:
        return 0.12;
      case RowEncoding::kInt4Token:
        return 0.15;
      case RowEncoding::kVector:
        return format().width == 2 ? 0.1 : 0.8;
      case RowEncoding::kHybrid:
        return 0.05;
      default:
        return 0.45;
    }
  }();
  EXPECT_LT(share, limit);
  EXPECT_GT(share, 1e-4);  // something was coded
  EXPECT_LE(tensor.energy_kept, 1.01);
  EXPECT_GT(tensor.energy_kept, format().rank > 0 ? 0.8 : 0.99);
}

// Zeros stay zeros, and so do huge and tiny tensors what they are to half a code.
TEST_P(CompressedRowsTest, EdgesOfTheDtype) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    const RowShape shape{dtype, 1, 64};
    for (const float magnitude :
         {0.0F, dtype == Dtype::kBf16 ? 0x1p-130F : 0x1p-22F, 1.0F, dtype == Dtype::kBf16 ? 0x1.fep127F : 65504.0F}) {
      // Products, and squares of distances, of such rows overflow or vanish.
      const bool squares = format().rank > 0 || format().encoding == RowEncoding::kVector;
      if (squares && magnitude != 0.0F && magnitude != 1.0F) continue;
      std::vector<std::byte> rows(40 * 64 * 2);
      for (std::size_t i = 0; i < 40 * 64; ++i) {
        store_element(rows.data() + 2 * i, dtype, i % 3 == 0 ? magnitude : i % 3 == 1 ? -magnitude : 0.0F);
      }
      CompressedTensor tensor = compressed(format(), shape, rows, {40});
      const std::vector<std::byte> plain = decompress_tensor(tensor, 1);
      for (std::size_t i = 0; i < 40 * 64; ++i) {
        const float before = load_element(rows.data() + 2 * i, dtype);
        const float after = load_element(plain.data() + 2 * i, dtype);
        ASSERT_TRUE(std::isfinite(after));
        if (magnitude == 0.0F) {
          ASSERT_EQ(after, 0.0F);
        } else if (format().rank == 0) {
          // Scales of four bits are truncated, which is much of a subnormal step.
          const double unit = dtype == Dtype::kBf16 ? 0x1p-133 : 0x1p-24;
          ASSERT_LE(std::abs(static_cast<double>(after) - before), 0.08 * magnitude + 16 * unit) << before;
        }
      }
    }
  }
}

TEST_P(CompressedRowsTest, NaNAndInfinityAreRefusedByIndex) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    const RowShape shape{Dtype::kF16, 2, 64};
    std::vector<std::byte> rows = outlier_rows(shape, std::vector<std::int64_t>{50}, 5);
    store_element(rows.data() + 2 * ((17 * 2 + 1) * 64 + 9), shape.dtype, bad);
    const Error error = error_of([&] { compressed(format(), shape, rows, {50}); });
    EXPECT_EQ(error.code(), ErrorCode::kFile);
    EXPECT_EQ(std::string(error.what()).rfind("k[17, 1, 9] is ", 0), 0U) << error.what();
  }
}

// What find_invalid_element() says of a compressed tensor.
std::string fault_text(CompressedTensor& tensor) {
  const std::vector<CompressedRun> runs = tensor.runs();
  const auto invalid = find_invalid_element(tensor.format, tensor.shape, tensor.rows(), runs);
  if (!invalid) return "";
  return error_of([&] { refuse_invalid_element("k", tensor.format, tensor.shape, *invalid, ErrorCode::kFile); }).what();
}

// Breaks one element of every stream and table that decompression reads.
TEST_P(CompressedRowsTest, BrokenPartsAreNamed) {
  const RowShape shape{Dtype::kF16, 2, 64};
  const std::vector<std::byte> rows = outlier_rows(shape, std::vector<std::int64_t>{80}, 6);
  CompressedTensor good = compressed(format(), shape, rows, {80});
  EXPECT_EQ(fault_text(good), "");
  const std::vector<FormatStream> streams = format_streams(format(), shape);
  for (std::size_t i = 0; i < streams.size(); ++i) {
    if (streams[i].type == StoredType::kU8) continue;  // every byte is a code
    CompressedTensor broken = good;
    std::byte* const at = broken.streams[i].data() + 12 * streams[i].token_bytes(shape.dtype);
    std::memset(at, streams[i].type == StoredType::kI8 ? 0x80 : 0xff, 4);
    const std::string text = fault_text(broken);
    EXPECT_EQ(text.rfind("k_" + std::string(streams[i].name) + "[12, 0, 0] is ", 0), 0U) << text;
  }
  const std::vector<FormatTable> tables = format_tables(format(), shape, 1);
  for (std::size_t i = 0; i < tables.size(); ++i) {
    CompressedTensor broken = good;
    std::memset(broken.tables[i].data(), 0xff, 4);
    // The tail of 80 tokens begins after 64 tokens: its first row is the group's.
    const std::string text = fault_text(broken);
    EXPECT_EQ(text.rfind("k_" + std::string(tables[i].name) + "[0", 0), 0U) << text;
  }
  if (format().rank > 0) {  // finite factors and a finite basis, whose product isn't
    const RowShape wide{Dtype::kBf16, 2, 64};
    CompressedTensor broken = compressed(format(), wide, outlier_rows(wide, std::vector<std::int64_t>{80}, 6), {80});
    EXPECT_EQ(fault_text(broken), "");
    store_element(broken.streams[0].data() + 12 * streams[0].token_bytes(wide.dtype), wide.dtype, 3e38F);
    store_element(broken.tables[0].data() + 2 * 9, wide.dtype, 30.0F);
    const std::string text = fault_text(broken);
    EXPECT_EQ(text.rfind("k[12, 0, 9] is ", 0), 0U) << text;
  }
  if (format().encoding == RowEncoding::kInt4Channel) {  // never read
    CompressedTensor unread = good;
    std::memset(unread.streams[1].data() + 79 * streams[1].token_bytes(shape.dtype), 0xff, 4);
    EXPECT_EQ(fault_text(unread), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CompressedRowsTest, ::testing::ValuesIn(every_format()),
                         [](const auto& test) { return test_name(test.param); });

TEST(CompressedRows, ScalesThatGiveInfinityAreBroken) {
  const RowShape shape{Dtype::kF16, 1, 64};
  const std::vector<std::byte> rows = outlier_rows(shape, std::vector<std::int64_t>{64}, 6);
  CompressedTensor tensor = compressed(parse_row_format("int8"), shape, rows, {64});
  for (const float scale : {0.0F, -1.0F, 600.0F, std::numeric_limits<float>::quiet_NaN()}) {
    std::memcpy(tensor.streams[1].data() + 4 * 5, &scale, 4);
    EXPECT_EQ(fault_text(tensor).rfind("k_scales[5, 0, 0] is ", 0), 0U) << scale;
  }
  tensor = compressed(parse_row_format("int4_token group 32"), shape, rows, {64});
  store_element(tensor.streams[1].data(), shape.dtype, 5000.0F);
  EXPECT_EQ(fault_text(tensor).rfind("k_scales[0, 0, 0] is 5000 (", 0), 0U);
}

TEST(CompressedRows, RunsThatCutGroupsAreABug) {
  const RowShape shape{Dtype::kBf16, 1, 64};
  CompressedTensor tensor = make_compressed(parse_row_format("int4_channel group 32"), shape, {100});
  std::vector<std::byte> plain(100 * 128);
  const auto refused = [&](const CompressedRun& run) {
    return error_of([&] {
             TensorCodec(tensor.format, shape, {1, kNoDevice})
                 .decompress(tensor.rows(), {&run, 1},
                             dense_view(static_cast<void*>(plain.data()), shape.dtype, 100, 1, 64));
           })
        .code();
  };
  EXPECT_EQ(refused({0, 16, 100, 16, 16, 16}), ErrorCode::kInternal);
  EXPECT_EQ(refused({0, 0, 100, 0, 48, 0}), ErrorCode::kInternal);
  EXPECT_EQ(refused({0, 96, 100, 96, 4, 98}), ErrorCode::kInternal);
}

}  // namespace
}  // namespace ringattn::testing
