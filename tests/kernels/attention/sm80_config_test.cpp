// SPDX-License-Identifier: Apache-2.0
// The choice of sm80_attention's configuration: a pure function of the description, which explains itself, and keeps to
// what an SM has.
#include <gtest/gtest.h>

#include "kernels/attention/sm80/config.hpp"
#include "kernels/decode/sm80/sm80_decode.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/kernels/attention/config_cases.hpp"

namespace ringattn::sm80 {
namespace {

using testing::spec_of_dims;

// Compute capability 8.6 and 8.9 have the smallest limits of the devices that the kernel runs on (CUDA C++ Programming
// Guide, technical specifications).
constexpr int kMaxSharedBytes = 99 * 1024;  // of a CTA
constexpr int kMultiprocessorRegisters = 64 * 1024;
constexpr int kMostRegisters = 255;  // of a thread
// Limits of an H200. The table was chosen by measurements on it.
constexpr int kH200SharedBytes = 228 * 1024;  // of an SM
constexpr int kReservedSharedBytes = 1024;    // of each CTA
constexpr int kOtherSharedBytes = 256;        // of each CTA: its work tile, and what the alignment takes

struct Expected {
  testing::HeadDims dims;
  int query_tile;
  int key_tile;
  int shared_bytes;
};
// Q, K and V rows of 2 bytes a column, padded to 64 columns, and 1,536 bytes of addresses.
constexpr Expected kExpected[] = {{{64, 64}, 128, 128, 128 * 128 + 2 * 128 * 256 + 1536},
                                  {{96, 96}, 128, 64, 128 * 256 + 2 * 64 * 512 + 1536},
                                  {{128, 128}, 128, 64, 128 * 256 + 2 * 64 * 512 + 1536},
                                  {{192, 128}, 128, 64, 128 * 384 + 64 * (384 + 256) + 1536},
                                  {{256, 256}, 64, 64, 64 * 512 + 64 * 1024 + 1536},
                                  {{512, 512}, 32, 64, 32 * (1024 + 128) + 3 * 16384 + 32 * 4 * (4 + 16) + 1536},
                                  // Q and probabilities, three strips of 16 KiB, maxima and sums of 16 keys each.
                                  {{576, 512}, 32, 64, 32 * (1152 + 128) + 3 * 16384 + 32 * 4 * (4 + 16) + 1536}};

TEST(Sm80Config, DependsOnDtypeAndDimsOnly) {
  for (const Expected& expected : kExpected) {
    for (const AttentionSpec& spec : testing::specs_of(expected.dims.head_dim, expected.dims.head_dim_v)) {
      SCOPED_TRACE(ringattn::describe(spec));
      const auto chosen = choose_config(spec);
      ASSERT_TRUE(chosen.has_value());
      EXPECT_EQ(chosen->head_dim, expected.dims.head_dim);
      EXPECT_EQ(chosen->head_dim_v, expected.dims.head_dim_v);
      EXPECT_EQ(chosen->query_tile(), expected.query_tile);
      EXPECT_EQ(chosen->key_tile, expected.key_tile);
      EXPECT_EQ(chosen->shared_bytes(), expected.shared_bytes);
    }
  }
}

TEST(Sm80Config, TakesItsHeadDimsAndNoOthers) {
  constexpr testing::HeadDims kOthers[] = {{512, 512}, {576, 512}};
  testing::expect_taken_dims([](const AttentionSpec& spec) { return choose_config(spec).has_value(); },
                             attention_missing, kOthers);
}

TEST(Sm80Config, EveryConfigurationHasAKernel) {
  for (const Expected& expected : kExpected) {
    testing::expect_made_tiles("sm80_attention", expected.dims, expected.query_tile, expected.key_tile);
  }
}

TEST(Sm80Config, FitsAMultiprocessor) {
  for (const AttentionConfig& config : kAttentionConfigs) {
    SCOPED_TRACE(describe(config));
    const int shared_bytes = config.shared_bytes() + kOtherSharedBytes;
    EXPECT_LE(shared_bytes, kMaxSharedBytes);
    EXPECT_LE(config.ctas * (shared_bytes + kReservedSharedBytes), kH200SharedBytes);
    EXPECT_LE(config.ctas * 32 * config.warps * kMostRegisters, kMultiprocessorRegisters);
    EXPECT_EQ(config.rows_of_warp % 16, 0);  // rows of an MMA
    EXPECT_EQ(config.key_tile % 16, 0);      // the second MMA takes 16 keys at a time
    EXPECT_GE(config.stages, 1);
    EXPECT_EQ(config.warps % config.slices, 0);
  }
}

TEST(Sm80Config, SaysWhatIsMissing) {
  testing::expect_missing_texts(
      [](const AttentionSpec& spec) {
        EXPECT_FALSE(choose_config(spec).has_value());
        return attention_missing(spec);
      },
      "192 with 128, 576 with 512", "64, 96, 128, 256, 512");
}

// What a .cu file names by its dims is the table's entry.
TEST(Sm80Config, IsFoundByDims) {
  static_assert(config_for(64, 64).key_tile == 128 && config_for(192, 128).head_dim_v == 128);
  EXPECT_EQ(describe(config_for(256, 256)), describe(*choose_config(spec_of_dims(Dtype::kBf16, 256, 256))));
}

TEST(Sm80Config, DescribesItself) {
  EXPECT_EQ(describe(*choose_config(spec_of_dims(Dtype::kBf16, 128, 128))),
            "tile 128x64, 4 warps of 32 rows, 2 stages of keys, 97.5 KiB");
  EXPECT_EQ(describe(*choose_config(spec_of_dims(Dtype::kF16, 192, 128))),
            "tile 128x64, 4 warps of 32 rows, 1 stage of keys, 89.5 KiB");
  EXPECT_EQ(describe(*choose_config(spec_of_dims(Dtype::kF16, 576, 512))),
            "tile 32x64, 8 warps of 64 columns, 3 strips of keys, 92.0 KiB");
  EXPECT_EQ(describe(*choose_config(spec_of_dims(Dtype::kBf16, 512, 512))),
            "tile 32x64, 8 warps of 64 columns, 3 strips of keys, 88.0 KiB");
}

// Each tensor of a cache may be one of these, by itself; latents are both.
TEST(Sm80Config, FormatsOfDecodedCaches) {
  const RowFormat fp8{RowEncoding::kFp8}, int8{RowEncoding::kInt8}, latents = latent_format(64);
  const RowFormat keys{RowEncoding::kInt4Channel, ScaleGrain::kTokenHead, 64};
  const RowFormat values{RowEncoding::kInt4Token, ScaleGrain::kTokenHead, 32};
  const auto missing = [](int head_dim, int head_dim_v, Dtype dtype, const CacheFormat& format, bool values_in_keys) {
    AttentionSpec fold = spec_of_dims(dtype, head_dim, head_dim_v);
    fold.kv_heads = head_dim == 576 ? 1 : 2;
    return formats_missing({fold, values_in_keys, format}).size();
  };
  for (const auto& [head_dim, head_dim_v] : {testing::HeadDims{64, 64}, {192, 128}, {256, 256}}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      for (const CacheFormat& format : {CacheFormat{}, {fp8, fp8}, {keys, values}, {values, keys}, {int8, {}}}) {
        EXPECT_EQ(missing(head_dim, head_dim_v, dtype, format, false), 0U) << describe(format);
      }
      EXPECT_EQ(missing(head_dim, head_dim_v, dtype, {fp8, {RowEncoding::kVector}}, false), 1U);
      EXPECT_EQ(missing(head_dim, head_dim_v, dtype, {latents, {}}, true), 2U);
      EXPECT_EQ(missing(head_dim, head_dim_v, dtype, {fp8, {}}, true), 1U);
    }
  }
  EXPECT_EQ(missing(576, 512, Dtype::kBf16, {latents, {}}, true), 0U);
  EXPECT_EQ(missing(576, 512, Dtype::kF16, {latents, {}}, true), 1U);
  EXPECT_EQ(missing(576, 512, Dtype::kBf16, {latents, {}}, false), 1U);
  EXPECT_EQ(missing(576, 512, Dtype::kBf16, {fp8, fp8}, false), 1U);
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    EXPECT_EQ(missing(512, 512, dtype, {}, false), 0U);
    for (const CacheFormat& format : {CacheFormat{fp8, fp8}, {keys, values}, {int8, {}}}) {
      EXPECT_EQ(missing(512, 512, dtype, format, false), 1U) << describe(format);
    }
    EXPECT_EQ(missing(512, 512, dtype, {latent_format(0), {}}, true), 1U);
  }
}

}  // namespace
}  // namespace ringattn::sm80
