// SPDX-License-Identifier: Apache-2.0
// Compressed caches: a decoded row has the bits that it has over the plain cache which decompression gives, and rows
// that are appended one by one leave the cache that compressing them all leaves.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/attention/block_mask_patterns.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/cache_update.hpp"
#include "kernels/decode/decode_block_mask.hpp"
#include "kernels/quant/row_codec.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr int kRows = 3;
constexpr int kHeads = 4;
constexpr std::int64_t kKvHeads = 2;

struct Results {
  std::vector<std::byte> out;
  std::vector<float> lse;
  bool operator==(const Results& other) const {
    return out == other.out && lse.size() == other.lse.size() &&
           std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
  }
};

// A step over caches of two formats, or over plain ones.
struct Step {
  DecodeSpec spec;
  std::vector<std::byte> q;
  std::vector<std::int32_t> lengths;

  Results run(DecodeStep step) const {
    const auto choice = choose_kernel(spec, {"cpu", "auto"});
    const auto backend = choice.row->make_backend({2, kNoDevice});
    const auto kernel = choice.row->make_kernel(spec, *backend);
    const auto sequences = static_cast<std::int64_t>(lengths.size());
    kernel->reserve({sequences, kRows, *std::ranges::max_element(lengths)});
    Results results;
    results.out.resize(static_cast<std::size_t>(sequences * kRows * kHeads * spec.attention.head_dim_v) * 2);
    results.lse.resize(static_cast<std::size_t>(sequences * kRows * kHeads));
    step.q = dense_view(static_cast<const void*>(q.data()), spec.attention.dtype, sequences * kRows, kHeads,
                        spec.attention.head_dim);
    step.rows = kRows;
    step.lengths = lengths.data();
    step.output.out = dense_view(static_cast<void*>(results.out.data()), spec.attention.dtype, sequences * kRows,
                                 kHeads, spec.attention.head_dim_v);
    step.output.lse = {results.lse.data(), kHeads, 1};
    kernel->enqueue(step, {});
    return results;
  }
};

// Keys and values of sequences as a compressed cache has them, and in a plain one: as many pages of one token more than
// the longest sequence has, a page for each. With `zero_point` (int4 only) that is every element: scales are 0.
class Caches {
 public:
  Caches(const CacheFormat& format, const RowShape& shape, const std::vector<std::int64_t>& lengths,
         const std::optional<float>& zero_point = {})
      : format_(format), shape_(shape), lengths_(lengths), capacity_(*std::ranges::max_element(lengths) + 1) {
    const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    const auto row_bytes = static_cast<std::size_t>(shape.heads * shape.dim) * size_of(shape.dtype);
    for (std::size_t i = 0; i < 2; ++i) {
      std::vector<std::byte> rows = outlier_rows(shape, lengths, i + 1);
      // One head's row is so small that its scale is subnormal: kernels may leave such tiles to the codec.
      for (std::int64_t c = 0; shape.dtype == Dtype::kBf16 && c < shape.dim; ++c) {
        std::byte* const element = rows.data() + static_cast<std::size_t>(2 * shape.heads * shape.dim + c) * 2;
        store_element(element, shape.dtype, load_element(element, shape.dtype) * 0x1p-122F);
      }
      tensors_[i] = compress_tensor("k", i == 0 ? format.k : format.v, view_of(rows, shape, tokens), lengths, {7, 1},
                                    ErrorCode::kUsage);
      for (std::size_t at = 0; zero_point && at < tensors_[i].streams[1].size(); at += 4) {
        store_element(tensors_[i].streams[1].data() + at, Dtype::kBf16, 0.0F);
        store_element(tensors_[i].streams[1].data() + at + 2, Dtype::kBf16, *zero_point);
      }
      const std::vector<std::byte> plain = decompress_tensor(tensors_[i], 1);
      dense_[i].resize(lengths.size() * static_cast<std::size_t>(capacity_) * row_bytes, std::byte{0xff});
      std::size_t row = 0;
      for (std::size_t s = 0; s < lengths.size(); ++s) {
        const auto count = static_cast<std::size_t>(lengths[s]);
        std::memcpy(dense_[i].data() + s * static_cast<std::size_t>(capacity_) * row_bytes,
                    plain.data() + row * row_bytes, count * row_bytes);
        row += count;
      }
    }
  }

  DecodeStep plain() {
    DecodeStep step;
    step.k = cache_view(dense_[0].data(), shape_.dtype, sequences(), capacity_, shape_.heads, shape_.dim);
    step.v = cache_view(dense_[1].data(), shape_.dtype, sequences(), capacity_, shape_.heads, shape_.dim);
    return step;
  }
  // What a step gives, of which all but the cache is said, over quantized pages of that many tokens.
  Results run_packed(const Step& of, DecodeStep step, std::int64_t page) const {
    const PageOrder order = shuffled_pages(lengths_, page, static_cast<std::uint64_t>(page));
    CompressedPool k(format_.k, shape_, order, sequences()), v(format_.v, shape_, order, sequences());
    k.fill(tensors_[0]);
    v.fill(tensors_[1]);
    step.block_table = order.view();
    step.quantized_k = k.view();
    step.quantized_v = v.view();
    if (format_.v.is_plain()) {
      const CompressedCache rows = v.view();
      step.v = cache_view(rows.streams[0].data, shape_.dtype, rows.pages, page, shape_.heads, shape_.dim);
    }
    return of.run(step);
  }

 private:
  std::int64_t sequences() const { return static_cast<std::int64_t>(lengths_.size()); }

  CacheFormat format_;
  RowShape shape_;
  std::vector<std::int64_t> lengths_;
  std::int64_t capacity_;
  CompressedTensor tensors_[2];
  std::vector<std::byte> dense_[2];
};

class CompressedCacheTest : public ::testing::TestWithParam<RowFormat> {
 protected:
  static std::vector<CacheFormat> formats() {
    return {{GetParam(), GetParam()}, {GetParam(), {}}, {{RowEncoding::kInt8}, GetParam()}};
  }
  static Step step_of(Dtype dtype, const std::vector<std::int64_t>& lengths) {
    Step step;
    step.spec.attention = make_spec(dtype, kHeads, kKvHeads, 64, {-1, 0});
    step.q = outlier_rows({dtype, kHeads, 64}, std::vector<std::int64_t>(lengths.size(), kRows), 3);
    step.lengths = {lengths.begin(), lengths.end()};
    return step;
  }
};

TEST_P(CompressedCacheTest, DecodingIsThatOfThePlainCache) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    const bool two_groups = dtype == Dtype::kBf16;
    const std::vector<std::int64_t> lengths{5, 64, 129, 700, two_groups ? 8250 : 31};
    for (const CacheFormat& format : formats()) {
      Caches caches(format, {dtype, kKvHeads, 64}, lengths);
      Step step = step_of(dtype, lengths);
      const Results expected = step.run(caches.plain());
      step.spec.format = format;
      for (const std::int64_t page : {16, 64, 256}) {
        if (two_groups && page != 64) continue;
        EXPECT_TRUE(caches.run_packed(step, {}, page) == expected) << describe(format) << ", pages of " << page;
      }
    }
  }
}

// Blocks of the mask are packed together, quantized or not, and their tiles fill KV splits in that order.
TEST_P(CompressedCacheTest, DecodingWithABlockMaskIsThatOfThePlainCache) {
  constexpr int kBlock = 128;
  for (const int mask_heads : {1, 2}) {
    const bool two_groups = mask_heads == 2;
    const std::vector<std::int64_t> lengths{5, 129, two_groups ? 11'100 : 700};
    const BlockMaskShape shape{64, kBlock, mask_heads};
    std::vector<MaskedSequence> sequences;
    for (const std::int64_t length : lengths) sequences.push_back({length - kRows, kRows, length});
    const BlockMaskPattern own = [&](const BlockMaskRow& place, std::vector<std::int32_t>& blocks) {
      for (std::int64_t b = std::max<std::int64_t>(0, sequences[place.sequence].position) / kBlock; b < place.blocks;
           ++b) {
        blocks.push_back(static_cast<std::int32_t>(b));
      }
      for (std::int64_t b = 0; b < place.blocks; ++b) {
        if ((b + place.head) % 4 != 0) blocks.push_back(static_cast<std::int32_t>(b));
      }
    };
    const Mask causal{-1, 0};
    const DecodeBlockMaskArrays listed = decode_block_mask(make_block_mask(shape, sequences, own), causal, kRows);
    DecodeStep with_block_mask;
    with_block_mask.block_mask = {listed.blocks.data(), listed.counts.data(), listed.stride};
    for (const CacheFormat& format : formats()) {
      if (two_groups && format != formats()[0]) continue;
      Caches caches(format, {Dtype::kBf16, kKvHeads, 64}, lengths);
      Step step = step_of(Dtype::kBf16, lengths);
      const Results dense = step.run(caches.plain());
      step.spec.attention.block_mask = shape;
      DecodeStep plain = caches.plain();
      plain.block_mask = with_block_mask.block_mask;
      const Results expected = step.run(plain);
      EXPECT_FALSE(expected == dense) << "all keys give the same: the test shows nothing";
      step.spec.format = format;
      for (const std::int64_t page : {16, 256}) {
        EXPECT_TRUE(caches.run_packed(step, with_block_mask, page) == expected)
            << describe(format) << ", pages of " << page;
      }
    }
  }
}

// Rows see only their own key, so they are elements of the cache, also where half of a zero point is subnormal.
TEST_P(CompressedCacheTest, ZeroPointsAreElements) {
  const RowFormat& format = GetParam();
  if (format.encoding != RowEncoding::kInt4Channel && format.encoding != RowEncoding::kInt4Token) return;
  for (const float zero_point : {0x1.8p-126F, -0x1p-125F, 3.0F}) {
    const std::vector<std::int64_t> lengths{64};
    Caches caches({format, format}, {Dtype::kBf16, kKvHeads, 64}, lengths, zero_point);
    Step step = step_of(Dtype::kBf16, lengths);
    step.spec.attention.mask = {0, 0};
    const Results expected = step.run(caches.plain());
    EXPECT_EQ(load_element(expected.out.data(), Dtype::kBf16), zero_point);
    step.spec.format = {format, format};
    EXPECT_TRUE(caches.run_packed(step, {}, 16) == expected) << zero_point;
  }
}

// Token by token into pages of every size, with steps of 1 and of 5 rows, and groups that close on the way.
TEST_P(CompressedCacheTest, AppendingLeavesWhatCompressingLeaves) {
  const RowFormat& format = GetParam();
  const RowShape shape{Dtype::kBf16, kKvHeads, 64};
  constexpr std::int64_t kTokens = 150;
  const std::vector<std::int64_t> lengths{kTokens, kTokens};
  const std::vector<std::byte> rows = outlier_rows(shape, lengths, 9);
  // Scales and codebooks of a whole tensor are there from the start.
  const CompressedTensor whole =
      compress_tensor("k", format, view_of(rows, shape, 2 * kTokens), lengths, {7, 1}, ErrorCode::kUsage);
  const auto backend = cpu::CpuBackend(1);
  for (const std::int64_t page : {16, 32, 128}) {
    for (const int step : {1, 5}) {
      const PageOrder order = shuffled_pages(lengths, page, 5);
      CompressedPool pool(format, shape, order, 2);
      CompressedTensor empty = make_compressed(format, shape, {0, 0});
      if (quantized_per_token(format)) empty.tables = whole.tables;
      pool.fill(empty);
      std::vector<std::int32_t> now(2);
      for (std::int64_t length = step; length <= kTokens; length += step) {
        std::vector<std::byte> fresh(static_cast<std::size_t>(2 * step) * 256);
        for (int s = 0; s < 2; ++s) {
          std::memcpy(fresh.data() + s * step * 256, rows.data() + (s * kTokens + length - step) * 256,
                      static_cast<std::size_t>(step) * 256);
        }
        now.assign(2, static_cast<std::int32_t>(length));
        CacheUpdate places;
        places.sequences = 2;
        places.rows = step;
        places.lengths = now.data();
        places.block_table = order.view();
        places.table_pages = order.columns;
        places.pages = order.pages;
        places.page_size = page;
        append_on_host({&places, pool.view(), view_of(fresh, shape, 2 * step)});
        if (length % 25 != 0 && length != 64 && length != 65) continue;
        // What the cache is now, read as a decode kernel reads it.
        std::vector<std::byte> prefix(static_cast<std::size_t>(2 * length) * 256);
        for (int s = 0; s < 2; ++s) {
          std::memcpy(prefix.data() + s * length * 256, rows.data() + s * kTokens * 256,
                      static_cast<std::size_t>(length) * 256);
        }
        const std::vector<std::int64_t> both{length, length};
        CompressedTensor expected = make_compressed(format, shape, both);
        if (quantized_per_token(format)) expected.tables = whole.tables;
        const std::vector<CompressedRun> runs = expected.runs();
        compress_on_host({format, shape, view_of(prefix, shape, 2 * length), {}, runs, expected.rows()}, 1);
        const std::vector<std::byte> elements = decompress_tensor(expected, 1);
        const CompressedCache cache = pool.view();
        for (int s = 0; s < 2; ++s) {
          for (std::int64_t head = 0; head < kKvHeads; ++head) {
            const StreamRowAt row_at = [&](int stream, std::int64_t position) -> const std::byte* {
              const PageSlot place = page_slot_of(places, s, position);
              return cache.streams[static_cast<std::size_t>(stream)].at(place.page, place.token, head);
            };
            std::vector<std::byte> got(static_cast<std::size_t>(length) * 128);
            RowCodec(format, shape, cache.tables).decompress(row_at, s, 0, length, length, head, got.data(), 128);
            for (std::int64_t t = 0; t < length; ++t) {
              ASSERT_EQ(
                  std::memcmp(got.data() + t * 128, elements.data() + ((s * length + t) * kKvHeads + head) * 128, 128),
                  0)
                  << "length " << length << ", page " << page << ", token " << t << ", head " << head;
            }
          }
        }
      }
    }
  }
}

// Quantized values can't hold NaN or infinity. A row's scale does, and all of its elements come back so.
TEST(CompressedCache, RowsThatAreNotFiniteComeBackSo) {
  for (const std::string_view words : {"fp8 token_head", "int8"}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      const RowFormat format = parse_row_format(words);
      const RowShape shape{dtype, 2, 64};
      const std::vector<std::int64_t> lengths{40};
      std::vector<std::byte> rows = outlier_rows(shape, lengths, 5);
      const auto put = [&](int token, int head, float value) {
        store_element(rows.data() + ((token * 2 + head) * 64 + 9) * 2, dtype, value);
      };
      put(17, 1, std::numeric_limits<float>::quiet_NaN());
      put(23, 0, -std::numeric_limits<float>::infinity());
      CompressedTensor tensor = make_compressed(format, shape, lengths);
      const std::vector<CompressedRun> runs = tensor.runs();
      compress_on_host({format, shape, view_of(rows, shape, 40), {}, runs, tensor.rows()}, 1);
      const std::vector<std::byte> plain = decompress_tensor(tensor, 1);
      for (int row = 0; row < 80; ++row) {
        const bool broken = row == 17 * 2 + 1 || row == 23 * 2;
        for (int i = 0; i < 64; ++i) {
          const float element = load_element(plain.data() + (row * 64 + i) * 2, dtype);
          ASSERT_EQ(std::isfinite(element), !broken) << words << ", row " << row << ", channel " << i;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CompressedCacheTest, ::testing::ValuesIn(quantized_formats()),
                         [](const auto& test) { return test_name(test.param); });

TEST(CompressedCache, FormatsWithARankAreNotDecoded) {
  DecodeSpec spec;
  spec.attention = make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0});
  spec.format.k = parse_row_format("low_rank rank 16");
  const Error error = error_of([&] { choose_kernel(spec, {"cpu", "auto"}); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(error.what()).find("low_rank rank 16 (supported: formats without a rank)"), std::string::npos)
      << error.what();
}

}  // namespace
}  // namespace ringattn::testing
