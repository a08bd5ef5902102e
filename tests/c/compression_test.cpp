// SPDX-License-Identifier: Apache-2.0
// Compression through the C interface: the bytes of C++, attention and decoding over them, and what is refused.
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "kernels/quant/low_rank.hpp"
#include "kernels/quant/tensor_compression.hpp"
#include "tests/c/c_tensors.hpp"
#include "tests/support/compressed_tensors.hpp"

namespace ringattn::testing {
namespace {

#define EXPECT_OK(call) EXPECT_EQ(call, RINGATTN_OK) << ringattn_error_text()

constexpr std::int64_t kKv = 2, kHeads = 4, kDim = 64;
const RowShape kShape{Dtype::kF16, kKv, kDim};
const DLDataType kHalf = c_dtype(Dtype::kF16);

std::vector<std::byte> rows_of(const RowShape& shape, std::int64_t tokens, std::uint64_t seed) {
  return outlier_rows(shape, std::array{tokens}, seed);
}

// A format's parts, in memory of their own, by the library's description of them.
class Parts {
 public:
  // `rows`: the axes of streams before heads: tokens, or pages and their size.
  Parts(const ringattn_compression* compression, const std::vector<std::int64_t>& rows) {
    auto facts = sized<ringattn_compression_facts>();
    EXPECT_OK(ringattn_compression_get_facts(compression, &facts));
    view_ = sized<ringattn_compressed>();
    for (const int kind : {RINGATTN_STREAM, RINGATTN_TABLE}) {
      const std::int64_t count = kind == RINGATTN_STREAM ? facts.streams : facts.tables;
      for (std::int32_t i = 0; i < count; ++i) {
        auto part = sized<ringattn_part>();
        EXPECT_OK(ringattn_compression_get_part(compression, kind, i, &part));
        std::vector<std::int64_t> shape(part.shape, part.shape + part.axes);
        if (kind == RINGATTN_STREAM) shape.insert(shape.begin(), rows.begin(), rows.end());
        std::size_t bytes = part.dtype.bits / 8U;
        for (const std::int64_t length : shape) bytes *= static_cast<std::size_t>(length);
        names.emplace_back(part.name);
        memory.emplace_back(bytes, std::byte{0x7f});  // what isn't written shows
        tensors.push_back(std::make_unique<CTensor>(memory.back().data(), part.dtype, shape));
        (kind == RINGATTN_STREAM ? view_.streams : view_.tables)[i] = tensors.back()->get();
      }
    }
  }

  const ringattn_compressed* get() const { return &view_; }

  std::vector<std::string> names;
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::unique_ptr<CTensor>> tensors;

 private:
  ringattn_compressed view_{};
};

class CCompression : public ::testing::Test {
 protected:
  ~CCompression() override { ringattn_compression_destroy(compression_); }

  void make(const char* format, std::int64_t sequences) {
    auto spec = sized<ringattn_compression_spec>();
    spec.format = format;
    spec.sequences = sequences;
    spec.seed = 7;
    spec.dtype = kHalf;
    spec.heads = kKv;
    spec.dim = kDim;
    auto options = sized<ringattn_options>();
    options.threads = 2;
    ringattn_compression_destroy(compression_);
    compression_ = nullptr;
    ASSERT_EQ(ringattn_compression_create(world_.get(), &spec, &options, &compression_), RINGATTN_OK)
        << ringattn_error_text();
  }

  ringattn_compression_tensors tensors(CTensor& plain, const Parts& parts, const std::vector<std::int64_t>& lengths) {
    auto call = sized<ringattn_compression_tensors>();
    call.name = "k";
    call.lengths = lengths.data();
    call.plain = plain.get();
    call.compressed = parts.get();
    return call;
  }

  SelfWorld world_;
  ringattn_compression* compression_ = nullptr;
};

TEST_F(CCompression, HasTheBytesOfCppBothWays) {
  const std::vector<std::int64_t> lengths{70, 0, 96};
  const std::vector<std::byte> rows = rows_of(kShape, 166, 3);
  for (const char* const format :
       {"fp8 token_head", "fp8 head", "fp8 tensor", "int8", "int4_token group 32", "int4_channel group 32",
        "vector width 4", "low_rank rank 16", "low_rank rank 40 heads 2", "hybrid rank 8 group 32 outliers 4"}) {
    SCOPED_TRACE(format);
    if (parse_row_format(format).rank > 0 && !has_low_rank()) continue;
    CompressedTensor expected =
        compress_tensor("k", parse_row_format(format), view_of(rows, kShape, 166), lengths, {7, 1}, ErrorCode::kUsage);
    make(format, 3);
    Parts parts(compression_, {166});
    CTensor plain(rows.data(), kHalf, {166, kKv, kDim});
    auto call = tensors(plain, parts, lengths);
    double kept = 0.0;
    EXPECT_OK(ringattn_compression_compress(compression_, &call, &kept));
    EXPECT_EQ(kept, expected.energy_kept);
    const std::vector<std::byte> back = decompress_tensor(expected, 1);
    std::vector<std::byte> c_back(back.size());
    CTensor to(c_back.data(), kHalf, {166, kKv, kDim});
    call.plain = to.get();
    EXPECT_OK(ringattn_compression_decompress(compression_, &call));
    EXPECT_EQ(c_back, back);
    if (std::string_view(format).starts_with("int4_channel")) continue;  // whose unread places are the caller's
    for (std::size_t i = 0; i < expected.streams.size(); ++i) EXPECT_EQ(parts.memory[i], expected.streams[i]);
    for (std::size_t i = 0; i < expected.tables.size(); ++i) {
      EXPECT_EQ(parts.memory[expected.streams.size() + i], expected.tables[i]);
    }
  }
}

TEST_F(CCompression, AttentionAndDecodingTakeItForKeysAndValues) {
  constexpr std::int64_t kTokens = 100;
  const std::vector<std::int64_t> lengths{kTokens};
  const std::vector<std::byte> q = rows_of({Dtype::kF16, kHeads, kDim}, kTokens, 1);
  const std::vector<std::byte> k = rows_of(kShape, kTokens, 2), v = rows_of(kShape, kTokens, 3);
  make("int4_channel group 32", 1);
  Parts parts(compression_, {kTokens});
  CTensor tk(k.data(), kHalf, {kTokens, kKv, kDim}), tv(v.data(), kHalf, {kTokens, kKv, kDim});
  auto call = tensors(tk, parts, lengths);
  EXPECT_OK(ringattn_compression_compress(compression_, &call, nullptr));
  std::vector<std::byte> plain(k.size());
  CTensor tplain(plain.data(), kHalf, {kTokens, kKv, kDim});
  call.plain = tplain.get();
  EXPECT_OK(ringattn_compression_decompress(compression_, &call));
  EXPECT_NE(plain, k);

  auto spec = sized<ringattn_spec>();
  spec.dtype = kHalf;
  spec.heads = kHeads;
  spec.kv_heads = kKv;
  spec.head_dim = kDim;
  auto batch = sized<ringattn_batch>();
  batch.sequences = 1;
  batch.q_lengths = lengths.data();
  std::array<std::vector<std::byte>, 2> outs;
  CTensor tq(q.data(), kHalf, {kTokens, kHeads, kDim});
  for (const bool compressed : {false, true}) {
    spec.k_format = compressed ? "int4_channel group 32" : nullptr;
    ringattn_attention* attention = nullptr;
    ASSERT_EQ(ringattn_attention_create(world_.get(), &spec, &batch, nullptr, &attention), RINGATTN_OK)
        << ringattn_error_text();
    outs[compressed].resize(q.size());
    CTensor to(outs[compressed].data(), kHalf, {kTokens, kHeads, kDim});
    auto given = sized<ringattn_attention_tensors>();
    given.q = tq.get();
    given.k = compressed ? nullptr : tplain.get();
    given.v = tv.get();
    given.out = to.get();
    if (compressed) given.compressed_k = parts.get();
    EXPECT_OK(ringattn_attention_run(attention, &given));
    given.k = compressed ? tplain.get() : nullptr;
    EXPECT_EQ(ringattn_attention_run(attention, &given), RINGATTN_USAGE);
    EXPECT_STREQ(ringattn_error_problem(), compressed ? "k is given" : "k is NULL");
    given.k = compressed ? nullptr : tplain.get();
    given.compressed_k = compressed ? nullptr : parts.get();
    EXPECT_EQ(ringattn_attention_run(attention, &given), RINGATTN_USAGE);
    EXPECT_STREQ(ringattn_error_problem(), compressed ? "compressed_k is NULL" : "compressed_k is given");
    ringattn_attention_destroy(attention);
  }
  EXPECT_EQ(outs[0], outs[1]);

  // The last row again, over the same rows as a dense cache of one page.
  Parts cache(compression_, {1, kTokens});
  for (std::size_t i = 0; i < cache.memory.size(); ++i) cache.memory[i] = parts.memory[i];
  for (std::size_t i = 0; i < cache.memory.size(); ++i) (*cache.tensors[i])->data = cache.memory[i].data();
  auto limits = sized<ringattn_decode_limits>();
  limits.sequences = 1;
  limits.keys = kTokens;
  ringattn_decode* decode = nullptr;
  ASSERT_EQ(ringattn_decode_create(world_.get(), &spec, &limits, nullptr, &decode), RINGATTN_OK)
      << ringattn_error_text();
  std::int32_t length = kTokens;
  constexpr std::size_t kRow = kHeads * kDim * 2;
  std::vector<std::byte> row(kRow);
  CTensor last(q.data() + q.size() - kRow, kHalf, {1, kHeads, kDim}), to(row.data(), kHalf, {1, kHeads, kDim});
  CTensor tn(&length, kInt32, {1}), tcache(v.data(), kHalf, {1, kTokens, kKv, kDim});
  auto given = sized<ringattn_decode_tensors>();
  given.q = last.get();
  given.v = tcache.get();
  given.lengths = tn.get();
  given.out = to.get();
  given.compressed_k = cache.get();
  EXPECT_OK(ringattn_decode_run(decode, &given));
  EXPECT_EQ(std::memcmp(row.data(), outs[0].data() + outs[0].size() - kRow, kRow), 0);
  // A program of interface 2 has no such members: what follows its struct in memory isn't read.
  given.size = offsetof(ringattn_decode_tensors, compressed_k);
  EXPECT_EQ(ringattn_decode_run(decode, &given), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "compressed_k is NULL");
  ringattn_decode_destroy(decode);
}

TEST_F(CCompression, RefusalsNameThePartAndTheIndex) {
  const std::vector<std::int64_t> lengths{40};
  std::vector<std::byte> rows = rows_of(kShape, 40, 3);
  make("fp8 token_head", 1);
  Parts parts(compression_, {40});
  CTensor plain(rows.data(), kHalf, {40, kKv, kDim});
  auto call = tensors(plain, parts, lengths);
  EXPECT_OK(ringattn_compression_compress(compression_, &call, nullptr));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(parts.memory[1].data() + (12 * kKv + 1) * 4, &nan, 4);
  EXPECT_EQ(ringattn_compression_decompress(compression_, &call), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "k_scales[12, 1, 0] is nan");

  const std::uint16_t infinity = 0x7c00;
  std::memcpy(rows.data() + (33 * kKv * kDim + 5) * 2, &infinity, 2);
  EXPECT_EQ(ringattn_compression_compress(compression_, &call, nullptr), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "k[33, 0, 5] is inf");

  (*parts.tensors[0])->shape[0] = 39;
  EXPECT_EQ(ringattn_compression_compress(compression_, &call, nullptr), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "k_codes is [39, 2, 64]");
  (*parts.tensors[0])->shape[0] = 40;
  (*parts.tensors[1])->dtype = kInt32;
  EXPECT_EQ(ringattn_compression_decompress(compression_, &call), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "k_scales holds int32");

  auto part = sized<ringattn_part>();
  EXPECT_EQ(ringattn_compression_get_part(compression_, RINGATTN_TABLE, 0, &part), RINGATTN_USAGE);
  auto spec = sized<ringattn_compression_spec>();
  spec.format = "int3";
  spec.dtype = kHalf;
  spec.heads = kKv;
  spec.dim = kDim;
  ringattn_compression* none = nullptr;
  EXPECT_EQ(ringattn_compression_create(world_.get(), &spec, nullptr, &none), RINGATTN_USAGE);
  spec.format = "fp8 token_head";
  spec.dtype = c_dtype(Dtype::kF32);
  EXPECT_EQ(ringattn_compression_create(world_.get(), &spec, nullptr, &none), RINGATTN_USAGE);
  spec.dtype = kHalf;
  auto options = sized<ringattn_options>();
  options.stripe = 64;
  EXPECT_EQ(ringattn_compression_create(world_.get(), &spec, &options, &none), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "ringattn_options::stripe is set");
  EXPECT_EQ(none, nullptr);
}

TEST_F(CCompression, FormatsAreChosenByMethodAndRatio) {
  auto spec = sized<ringattn_spec>();
  spec.dtype = kHalf;
  spec.heads = kHeads;
  spec.kv_heads = kKv;
  spec.head_dim = 128;
  auto formats = sized<ringattn_formats>();
  EXPECT_OK(ringattn_choose_formats("int4", 0.0, &spec, &formats));
  EXPECT_STREQ(formats.k, "int4_channel group 32");
  EXPECT_STREQ(formats.v, "int4_token group 32");
  EXPECT_NEAR(formats.removed, 0.688, 0.001);
  EXPECT_OK(ringattn_choose_formats("int4", 0.7, &spec, &formats));
  EXPECT_STREQ(formats.k, "int4_channel group 64");
  EXPECT_OK(ringattn_choose_formats("fp8 tensor", 0.5, &spec, &formats));
  EXPECT_STREQ(formats.k, "fp8 tensor");
  EXPECT_STREQ(formats.v, "fp8 tensor");
  EXPECT_EQ(ringattn_choose_formats("int4", 0.8, &spec, &formats), RINGATTN_USAGE);
  EXPECT_EQ(ringattn_choose_formats("int5", 0.0, &spec, &formats), RINGATTN_USAGE);
}

}  // namespace
}  // namespace ringattn::testing
