// SPDX-License-Identifier: Apache-2.0
// e4m3 against its definition in fp64, and the rows of 656 bytes that it serves.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/e4m3.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

// What OCP's table says of a code.
double defined_value(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa / 8.0, -6) : std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
  return code >= 128 ? -magnitude : magnitude;
}

// The nearest of all numbers, the even one of two, and the greatest for all that lies beyond.
int nearest_code(double value) {
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::min(std::abs(value), 448.0);
  int nearest = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double now = std::abs(defined_value(code) - magnitude);
    const double before = std::abs(defined_value(nearest) - magnitude);
    if (now < before || (now == before && code % 2 == 0)) nearest = code;
  }
  return std::signbit(value) ? nearest | 0x80 : nearest;
}

TEST(E4m3, EveryCodeHasItsValue) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_float(static_cast<std::uint8_t>(code));
    const double expected = defined_value(code);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value)) << code;
      continue;
    }
    EXPECT_EQ(static_cast<double>(value), expected) << code;
    EXPECT_EQ(std::signbit(value), code >= 128) << code;
    EXPECT_EQ(float_to_e4m3(value), code);
  }
  EXPECT_EQ(e4m3_to_float(0x7e), kMaxE4m3);
  EXPECT_EQ(e4m3_to_float(0x01), 0x1p-9F);
}

TEST(E4m3, EveryBf16IsRoundedToTheNearest) {
  for (std::uint32_t bits = 0; bits < 65'536; ++bits) {
    const float value = bf16_to_float(static_cast<std::uint16_t>(bits));
    ASSERT_EQ(float_to_e4m3(value), nearest_code(static_cast<double>(value))) << value;
  }
}

// fp32 is finer than bf16: between two FP8 values, and next to the midpoint.
TEST(E4m3, TiesGoToTheEvenCode) {
  for (int code = 0; code < 0x7f; ++code) {
    const double next = code == 0x7e ? 480.0 : defined_value(code + 1);
    const auto middle = static_cast<float>((defined_value(code) + next) / 2.0);
    for (const float value : {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, 1000.0F)}) {
      ASSERT_EQ(float_to_e4m3(value), nearest_code(value)) << value;
      ASSERT_EQ(float_to_e4m3(-value), nearest_code(-value)) << value;
    }
  }
  EXPECT_EQ(float_to_e4m3(kInfinity), 0x7e);
  EXPECT_EQ(float_to_e4m3(-kInfinity), 0xfe);
  EXPECT_EQ(float_to_e4m3(-std::numeric_limits<float>::quiet_NaN()), 0x7f);
  EXPECT_EQ(float_to_e4m3(std::numeric_limits<float>::denorm_min()), 0);
}

// Latents and rotary keys with padding after each row.
struct Rows {
  std::int64_t tokens;
  std::int64_t latent_dim;
  std::int64_t rope_dim;
  std::vector<std::uint16_t> latent;
  std::vector<std::uint16_t> k_rope;

  Rows(std::int64_t token_count, std::int64_t latent_width, std::int64_t rope_width)
      : tokens(token_count),
        latent_dim(latent_width),
        rope_dim(rope_width),
        latent(static_cast<std::size_t>(tokens * (latent_dim + 8)), 0xffffU),
        k_rope(static_cast<std::size_t>(tokens * (rope_dim + 8)), 0xffffU) {}

  MutableTensorView latent_view() {
    return {latent.data(), Dtype::kBf16, tokens, 1, latent_dim, latent_dim + 8, latent_dim};
  }
  MutableTensorView rope_view() { return {k_rope.data(), Dtype::kBf16, tokens, 1, rope_dim, rope_dim + 8, rope_dim}; }
  std::uint16_t& latent_at(std::int64_t token, std::int64_t i) {
    return latent[static_cast<std::size_t>(token * (latent_dim + 8) + i)];
  }
};

Rows normal_rows(std::int64_t tokens, std::int64_t latent_dim, std::int64_t rope_dim) {
  Rows rows(tokens, latent_dim, rope_dim);
  std::mt19937_64 generator(1);
  std::normal_distribution<float> normal;
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t i = 0; i < latent_dim; ++i) rows.latent_at(token, i) = float_to_bf16(normal(generator));
    for (std::int64_t i = 0; i < rope_dim; ++i) {
      rows.k_rope[static_cast<std::size_t>(token * (rope_dim + 8) + i)] = float_to_bf16(normal(generator));
    }
  }
  return rows;
}

TEST(Fp8LatentRows, AreAsLongAsFlashMlasAre) {
  EXPECT_EQ(latent_row_bytes(512, 64), 656);
  EXPECT_EQ(latent_row_bytes(128, 0), 132);
  for (const auto& dims : {std::pair{500, 64}, {0, 64}, {-128, 64}, {512, -1}}) {
    EXPECT_EQ(error_of([&] { latent_row_bytes(dims.first, dims.second); }).code(), ErrorCode::kUsage);
  }
}

// Every code with every kind of scale, read by the definition, from rows at odd addresses.
TEST(Fp8LatentRows, AreReadByTheDefinition) {
  const float scales[] = {1.0F, 0.0123F, 3e38F, -0.75F, 1e-38F, 0.0F, std::numeric_limits<float>::quiet_NaN(), 1e-45F};
  constexpr std::int64_t kStride = 656 + 3;
  std::vector<std::byte> bytes(1 + 2 * kStride, std::byte{0xaa});
  for (int row = 0; row < 2; ++row) {
    std::byte* const at = bytes.data() + 1 + row * kStride;
    for (int i = 0; i < 512; ++i) at[i] = std::byte(i % 128 + (i / 128 + row) % 2 * 128);
    std::memcpy(at + 512, scales + row * 4, 16);
    for (std::uint16_t i = 0; i < 64; ++i) {
      const auto element = static_cast<std::uint16_t>(0x7f70 + row * 64 + i);  // NaN patterns too
      std::memcpy(at + 528 + 2 * i, &element, 2);
    }
  }
  Rows rows(2, 512, 64);
  dequantize_latent_rows(bytes.data() + 1, kStride, rows.latent_view(), rows.rope_view());
  for (std::int64_t row = 0; row < 2; ++row) {
    for (std::int64_t i = 0; i < 512; ++i) {
      const auto code = static_cast<int>(i % 128 + (i / 128 + row) % 2 * 128);
      // Exact in fp64; the two roundings that follow are the definition's.
      const double product = defined_value(code) * static_cast<double>(scales[row * 4 + i / 128]);
      const std::uint16_t expected = float_to_bf16(static_cast<float>(product));
      if (std::isnan(product)) {
        ASSERT_TRUE(std::isnan(bf16_to_float(rows.latent_at(row, i)))) << row << ", " << i;
      } else {
        ASSERT_EQ(rows.latent_at(row, i), expected) << row << ", " << i;
      }
    }
    for (std::int64_t i = 0; i < 8; ++i) ASSERT_EQ(rows.latent_at(row, 512 + i), 0xffffU);
    ASSERT_EQ(
        std::memcmp(&rows.k_rope[static_cast<std::size_t>(row * 72)], bytes.data() + 1 + row * kStride + 528, 128), 0);
  }
}

// Half a step of e4m3 of the block's greatest magnitude, or of the number itself where that is more.
TEST(Fp8LatentRows, ComeBackWithinTheirRounding) {
  for (const std::int64_t latent_dim : {128, 512, 640}) {
    Rows rows = normal_rows(40, latent_dim, 64);
    const std::int64_t bytes = latent_row_bytes(latent_dim, 64);
    std::vector<std::byte> packed(static_cast<std::size_t>(40 * bytes));
    quantize_latent_rows(rows.latent_view(), rows.rope_view(), packed.data(), bytes);
    Rows back(40, latent_dim, 64);
    dequantize_latent_rows(packed.data(), bytes, back.latent_view(), back.rope_view());
    EXPECT_EQ(back.k_rope, rows.k_rope);
    for (std::int64_t token = 0; token < 40; ++token) {
      for (std::int64_t block = 0; block < latent_dim; block += kLatentScaleBlock) {
        float greatest = 0.0F;
        for (std::int64_t i = block; i < block + kLatentScaleBlock; ++i) {
          greatest = std::max(greatest, std::abs(bf16_to_float(rows.latent_at(token, i))));
        }
        for (std::int64_t i = block; i < block + kLatentScaleBlock; ++i) {
          const float value = bf16_to_float(rows.latent_at(token, i));
          const float allowed = std::max(std::abs(value) * 0x1p-4F, greatest / kMaxE4m3 * 0x1p-10F) +
                                std::abs(value) * 0x1p-8F;  // bf16's own
          ASSERT_LE(std::abs(bf16_to_float(back.latent_at(token, i)) - value), allowed) << token << ", " << i;
          if (std::abs(value) == greatest) {
            ASSERT_EQ(back.latent_at(token, i), rows.latent_at(token, i));
          }
        }
      }
    }
  }
}

TEST(Fp8LatentRows, ZerosNansAndInfinities) {
  Rows rows = normal_rows(5, 128, 64);
  for (std::int64_t i = 0; i < 128; ++i) rows.latent_at(0, i) = i % 2 == 0 ? 0 : 0x8000U;           // ±0
  rows.latent_at(1, 9) = 0xffc0U;                                                                   // NaN
  rows.latent_at(2, 9) = 0xff80U;                                                                   // −∞
  for (std::int64_t i = 0; i < 128; ++i) rows.latent_at(3, i) = static_cast<std::uint16_t>(i % 3);  // least bf16s
  std::vector<std::byte> packed(static_cast<std::size_t>(5 * latent_row_bytes(128, 64)));
  quantize_latent_rows(rows.latent_view(), rows.rope_view(), packed.data(), latent_row_bytes(128, 64));
  float scale = 0.0F;
  std::memcpy(&scale, packed.data() + 128, sizeof(scale));
  EXPECT_EQ(scale, 1.0F);
  Rows back(5, 128, 64);
  dequantize_latent_rows(packed.data(), latent_row_bytes(128, 64), back.latent_view(), back.rope_view());
  for (std::int64_t i = 0; i < 128; ++i) {
    EXPECT_EQ(back.latent_at(0, i), rows.latent_at(0, i));
    EXPECT_EQ(std::isnan(bf16_to_float(back.latent_at(1, i))), i == 9) << i;
    EXPECT_TRUE(std::isnan(bf16_to_float(back.latent_at(2, i)))) << i;
    EXPECT_EQ(back.latent_at(3, i), rows.latent_at(3, i)) << i;
  }
}

TEST(Fp8LatentRows, RefusesViewsThatDoNotFit) {
  Rows rows(2, 128, 64);
  std::vector<std::byte> packed(1024);
  const auto refused = [&](const MutableTensorView& latent, const MutableTensorView& k_rope, std::int64_t stride) {
    EXPECT_EQ(error_of([&] { dequantize_latent_rows(packed.data(), stride, latent, k_rope); }).code(),
              ErrorCode::kInternal);
    EXPECT_EQ(error_of([&] { quantize_latent_rows(latent, k_rope, packed.data(), stride); }).code(),
              ErrorCode::kInternal);
  };
  MutableTensorView latent = rows.latent_view();
  const std::int64_t bytes = latent_row_bytes(128, 64);
  refused(latent, rows.rope_view(), bytes - 1);
  latent.tokens = 1;
  refused(latent, rows.rope_view(), bytes);
  latent = rows.latent_view();
  latent.dtype = Dtype::kF16;
  refused(latent, rows.rope_view(), bytes);
}

// Quantized values, scales and rotary keys of a row are contiguous, whatever lies between rows, and also in a cache
// without pages.
TEST(Fp8LatentRows, CachesKnowEveryStreamOfTheirRows) {
  constexpr std::int64_t kPages = 3, kTokens = 5, kTokenStride = 700, kPageStride = 6 * kTokenStride;
  std::vector<std::byte> rows(kPages * kPageStride);
  for (const bool paged : {false, true}) {
    const std::int64_t pages = paged ? kPages : 1;
    const CompressedCache cache = latent_cache(rows.data(), 512, 64, pages, kTokens, kPageStride, kTokenStride);
    std::int64_t offset = 0;
    std::size_t at = 0;
    for (const FormatStream& stream : format_streams(cache.format, cache.shape)) {
      const auto& lies = cache.streams[at++];
      EXPECT_EQ(lies.data, rows.data() + offset) << stream.name;
      EXPECT_EQ(lies.page_stride, kPageStride) << stream.name;
      EXPECT_EQ(lies.token_stride, kTokenStride) << stream.name;
      offset += stream.token_bytes(cache.shape.dtype);
    }
    EXPECT_EQ(at, 3U);
    EXPECT_EQ(offset, latent_row_bytes(512, 64));
  }
}

}  // namespace
}  // namespace ringattn::testing
