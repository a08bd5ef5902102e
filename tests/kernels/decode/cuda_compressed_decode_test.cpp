// SPDX-License-Identifier: Apache-2.0
// Decoding over compressed caches on a GPU: the bits that the same kernel has over the plain cache which decompression
// gives. What no token owns is 0xff: NaN, and invalid quantized values.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/registry.hpp"
#include "tests/kernels/decode/compressed_steps.hpp"

namespace ringattn::testing {
namespace {

using Case = CompressedCase;

// By every kernel that reads such a cache. `shares`: KV partitions, in caches of their own.
void expect_plain_bits(const Case& c, int shares = 1) {
  for (const DecodeRow* row : rows_here(c.spec)) {
    SCOPED_TRACE(fmt::format("{}: {}, {} rows, page {}, slices {}, {} shares", row->name, describe(c.spec), c.rows,
                             c.page, c.slices, shares));
    CompressedSteps steps(*row, c);
    const std::vector<std::byte> expected = steps.run(false);
    const std::vector<std::byte> got = shares == 1 ? steps.run(true) : steps.run_shares(true, shares);
    if (got == expected) continue;
    const AttentionSpec& fold = c.spec.attention;
    const std::size_t rows = c.lengths.size() * static_cast<std::size_t>(c.rows * fold.heads);
    std::string where;
    std::size_t count = 0;
    for (std::size_t i = 0; i + 1 < got.size(); i += 2) {
      if (std::memcmp(&got[i], &expected[i], 2) == 0 || ++count > 1) continue;
      const auto dims = static_cast<std::size_t>(fold.head_dim_v);
      const std::size_t at = i / 2;
      where = at >= rows * dims
                  ? fmt::format("LSE of row and head {}", (at - rows * dims) / 2)
                  : fmt::format("row and head {}, column {}: got {}, expected {}", at / dims, at % dims,
                                load_element(&got[i], fold.dtype), load_element(&expected[i], fold.dtype));
    }
    ADD_FAILURE() << where << "; " << count << " of " << got.size() / 2 << " elements and halves of LSEs differ";
  }
}

Case usual(const CacheFormat& format, Dtype dtype = Dtype::kBf16, int dim = 128) {
  Case c;
  c.spec.attention = make_spec(dtype, 8, 2, dim, {-1, 0}, dim == 192 ? 128 : dim);
  c.spec.format = format;
  c.lengths = {5, 64, 129, 700, 8250};
  return c;
}

std::vector<CacheFormat> formats() {
  const RowFormat by_tensor{RowEncoding::kFp8, ScaleGrain::kTensor}, by_head{RowEncoding::kFp8, ScaleGrain::kHead};
  return {{kFp8, kFp8},       {kInt8, kInt8},     {kKeys32, kValues}, {kKeys64, kValues},  {by_tensor, by_head},
          {kValues, kKeys32}, {kValues, kKeys64}, {kInt8, kValues},   {kKeys32, by_tensor}};
}

TEST(CudaCompressedDecode, EveryFormatDtypeAndPage) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : formats()) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      for (const int dim : {64, 128}) {
        for (const std::int64_t page : {std::int64_t{0}, std::int64_t{16}, std::int64_t{64}, std::int64_t{256}}) {
          Case c = usual(format, dtype, dim);
          c.page = page;
          if (page == 16) c.rows = 3;
          expect_plain_bits(c);
        }
      }
    }
  }
}

TEST(CudaCompressedDecode, OneSequenceAsTheCardLikesIt) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : formats()) {
    for (const int slices : {0, 1, 2}) {
      Case c = usual(format);
      c.lengths = {3 * 8192};
      c.page = 0;
      c.slices = slices;
      expect_plain_bits(c);
    }
  }
}

// As few as tools can watch that take each step to a hundred times its time; tails, a full KV split, and work tiles of
// two CTAs.
TEST(CudaCompressedDecode, AFewTiles) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kFp8, kFp8}, CacheFormat{kInt8, kInt8}, {kKeys32, kValues}}) {
    for (const int slices : {1, 2}) {
      Case c = usual(format);
      c.lengths = {5, 129};
      c.slices = slices;
      expect_plain_bits(c);
    }
  }
}

// More sequences than a launch takes, whose tails lie sequence by sequence.
TEST(CudaCompressedDecode, MoreSequencesThanALaunch) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kFp8, {RowEncoding::kFp8, ScaleGrain::kHead}}, {kKeys32, kValues}}) {
    for (const std::int64_t page : {0, 16}) {
      Case c = usual(format, Dtype::kBf16, 64);
      c.lengths.clear();
      for (std::int64_t s = 0; s < 1100; ++s) c.lengths.push_back(1 + s * 37 % 90);
      c.page = page;
      expect_plain_bits(c);
    }
  }
}

// TMA loads 16 bytes of them: the numbers of one head, or of several.
TEST(CudaCompressedDecode, ScalesOfSeveralHeadsSideBySide) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kFp8, kFp8}, CacheFormat{kInt8, kValues}, {kKeys64, kFp8}}) {
    for (const int kv_heads : {1, 4, 8}) {
      for (const std::int64_t page : {0, 16, 128}) {
        Case c = usual(format);
        c.spec.attention = make_spec(Dtype::kBf16, 4 * kv_heads, kv_heads, 128, {-1, 0}, 128);
        c.page = page;
        expect_plain_bits(c);
      }
    }
  }
}

TEST(CudaCompressedDecode, LengthsAtEdgesOfTilesAndKvSplits) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kFp8, kFp8}, CacheFormat{kKeys64, kValues}, {kKeys32, kKeys64}}) {
    for (const int slices : {1, 2, 4}) {
      Case c = usual(format);
      c.lengths = {1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 8191, 8192, 8193, 8224, 16390};
      c.slices = slices;
      c.page = slices == 2 ? 32 : 128;
      expect_plain_bits(c);
    }
  }
}

TEST(CudaCompressedDecode, OtherDimsAndManyRows) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kFp8, kFp8}, CacheFormat{kInt8, kInt8}, {kKeys32, kValues}}) {
    for (const int dim : {96, 192, 256}) {
      Case c = usual(format, dim == 96 ? Dtype::kF16 : Dtype::kBf16, dim);
      c.page = dim == 192 ? 0 : 32;
      expect_plain_bits(c);
    }
    for (const int rows : {4, 5, 16}) {  // of four query heads: 16 rows of a block, and more
      Case c = usual(format);
      c.rows = rows;
      expect_plain_bits(c);
    }
  }
}

TEST(CudaCompressedDecode, WindowsSinksAndCaps) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kFp8, kFp8}, CacheFormat{kKeys32, kValues}}) {
    for (const bool paged : {false, true}) {
      Case c = usual(format);
      c.page = paged ? 16 : 0;
      c.rows = 2;
      c.spec.attention.mask = {1000, 0};
      c.spec.attention.sinks = true;
      c.spec.attention.softcap = 20.0F;
      expect_plain_bits(c);
    }
  }
}

// Rows that exceed the rescale threshold, in the first, a middle and a last KV split.
TEST(CudaCompressedDecode, WorkTilesThatFailAreComputedTileByTile) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kFp8, kFp8}, CacheFormat{kInt8, kInt8}, {kKeys32, kValues}}) {
    for (const std::int64_t page : {0, 64}) {
      for (const std::vector<std::int64_t>& loud :
           {std::vector<std::int64_t>{200}, {9000, 9001}, {2 * 8192 + 40}, {150, 8400, 16450}}) {
        Case c = usual(format);
        c.page = page;
        c.rows = 2;
        c.lengths = {300, 2 * 8192 + 100};
        c.loud = loud;
        c.loudness = 300.0F;
        expect_plain_bits(c);
      }
    }
  }
}

// Pairs of which a fused product and sum isn't what two roundings give.
TEST(CudaCompressedDecode, ZerosFarBelowTheirScales) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kKeys32, kValues}, CacheFormat{kKeys64, kKeys32}, {kValues, kValues}}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      Case c = usual(format, dtype);
      c.tiny_zeros = true;
      expect_plain_bits(c);
      c.spec.attention.head_dim = c.spec.attention.head_dim_v = 64;
      c.page = 0;
      expect_plain_bits(c);
    }
  }
}

// Scales that others have made: a product of elements would be rounded otherwise.
TEST(CudaCompressedDecode, ScalesThatAreNoElements) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  const RowFormat by_tensor{RowEncoding::kFp8, ScaleGrain::kTensor}, by_head{RowEncoding::kFp8, ScaleGrain::kHead};
  for (const CacheFormat& format : {CacheFormat{kFp8, kFp8}, CacheFormat{kInt8, kInt8}, {by_tensor, by_head}}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      for (const int slices : {1, 2, 4}) {
        Case c = usual(format, dtype, slices == 2 ? 64 : 128);
        c.odd_scales = true;
        c.slices = slices;
        c.rows = slices == 1 ? 3 : 1;
        expect_plain_bits(c);
      }
    }
  }
}

// Plain keys and quantized values, or the other way round: of kernels that read both.
TEST(CudaCompressedDecode, OneOfBothIsPlain) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const RowFormat& format : {kFp8, kInt8, kKeys32, kKeys64, kValues}) {
    for (const CacheFormat& of : {CacheFormat{format, {}}, CacheFormat{{}, format}}) {
      for (const int dim : {128, 256}) {
        Case c = usual(of, Dtype::kBf16, dim);
        c.page = dim == 128 ? 16 : 0;
        c.rows = 2;
        expect_plain_bits(c);
      }
    }
  }
}

TEST(CudaCompressedDecode, EveryFormatOfEveryDim) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : formats()) {
    for (const int dim : {96, 192, 256}) {
      const bool wide_groups = format.k == kKeys64 || format.v == kKeys64;
      if (dim == 96 && wide_groups) continue;  // 96 channels are no multiple of 64
      Case c = usual(format, dim == 192 ? Dtype::kF16 : Dtype::kBf16, dim);
      c.lengths = {1, 63, 200, 4200};
      c.page = dim == 192 ? 256 : 16;
      c.rows = dim == 256 ? 16 : 1;
      expect_plain_bits(c);
    }
  }
}

TEST(CudaCompressedDecode, PartitionsOfTheKeysMergeToTheWhole) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kFp8, kFp8}, CacheFormat{kInt8, kInt8}, {kKeys32, kValues}}) {
    for (const int shares : {2, 3}) {
      Case c = usual(format);
      c.lengths = {1, 4096, 8193, 3 * 8192 + 77};
      c.rows = 2;
      c.page = shares == 2 ? 16 : 128;
      expect_plain_bits(c, shares);
    }
  }
}

// Blocks of the mask are packed together, quantized or not, in kernels that read quantized caches with a mask.
TEST(CudaCompressedDecode, BlockMasksOfKeys) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kFp8, kFp8}, CacheFormat{kKeys32, kValues}, {kValues, kKeys64}}) {
    for (const int mask_heads : {1, 2}) {
      for (const int dim : {64, 128, 256}) {
        Case c = usual(format, Dtype::kBf16, dim);
        c.spec.attention.block_mask = {128, 128, mask_heads};
        c.lengths = {3, 128, 129, 700, 11'100};
        c.page = mask_heads == 1 ? 16 : 256;
        c.rows = 3;
        if (dim == 256) c.page = 0;
        expect_plain_bits(c);
      }
    }
  }
}

TEST(CudaCompressedDecode, WhatCantBeReadIsNamed) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  Case c = usual({kFp8, kFp8});
  c.spec.format.v = {};
  for (const DecodeRow& row : kernel_table<DecodeSpec>()) {
    if (row.name != "sm90_attention") continue;
    const std::vector<std::string> missing = row.missing(c.spec);
    ASSERT_EQ(missing.size(), 1U);
    EXPECT_EQ(missing[0], "plain (supported: fp8, int8 and int4, of both tensors)");
  }
}

}  // namespace
}  // namespace ringattn::testing
