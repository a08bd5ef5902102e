// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/latent_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/e4m3.hpp"
#include "base/error.hpp"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn {

namespace {

constexpr auto kElement = static_cast<std::int64_t>(size_of(Dtype::kBf16));

void check_views(const TensorView& latent, const TensorView& k_rope, std::int64_t row_stride) {
  const std::int64_t bytes = latent_row_bytes(latent.dim, k_rope.dim);
  if (latent.dtype == Dtype::kBf16 && k_rope.dtype == Dtype::kBf16 && latent.heads == 1 && k_rope.heads == 1 &&
      latent.tokens == k_rope.tokens && row_stride >= bytes) {
    return;
  }
  fail(ErrorCode::kInternal,
       fmt::format("latents {} [{}, {}, {}] and rotary keys {} [{}, {}, {}] in rows of {} bytes",
                   dtype_name(latent.dtype), latent.tokens, latent.heads, latent.dim, dtype_name(k_rope.dtype),
                   k_rope.tokens, k_rope.heads, k_rope.dim, row_stride),
       fmt::format("both are bf16 [tokens, 1, dim], and a row has at least {} bytes", bytes));
}

}  // namespace

std::int64_t latent_row_bytes(std::int64_t latent_dim, std::int64_t rope_dim) {
  if (latent_dim < 1 || latent_dim % kLatentScaleBlock != 0 || rope_dim < 0) {
    fail(ErrorCode::kUsage, fmt::format("FP8 latents of {} with rotary keys of {}", latent_dim, rope_dim),
         fmt::format("{} numbers share a scale", kLatentScaleBlock),
         fmt::format("Give latents whose dim is a multiple of {}, or latents of 16 bits.", kLatentScaleBlock));
  }
  return latent_dim + latent_dim / kLatentScaleBlock * static_cast<std::int64_t>(sizeof(float)) + rope_dim * kElement;
}

void dequantize_latent_rows(const std::byte* rows, std::int64_t row_stride, const MutableTensorView& latent,
                            const MutableTensorView& k_rope) {
  check_views(latent, k_rope, row_stride);
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (std::size_t code = 0; code < table.size(); ++code) {
      table[code] = e4m3_to_float(static_cast<std::uint8_t>(code));
    }
    return table;
  }();
  const std::int64_t blocks = latent.dim / kLatentScaleBlock;
  for (std::int64_t row = 0; row < latent.tokens; ++row, rows += row_stride) {
    const std::byte* const scales = rows + latent.dim;
    std::byte* target = latent.at(row, 0);
    for (std::int64_t block = 0; block < blocks; ++block, target += kLatentScaleBlock * kElement) {
      float scale = 0.0F;
      std::memcpy(&scale, scales + block * static_cast<std::int64_t>(sizeof(float)), sizeof(float));
      const std::byte* const quantized = rows + block * kLatentScaleBlock;
      std::uint16_t made[kLatentScaleBlock];
      for (std::int64_t i = 0; i < kLatentScaleBlock; ++i) {
        made[i] = float_to_bf16(values[std::to_integer<std::size_t>(quantized[i])] * scale);
      }
      std::memcpy(target, made, sizeof(made));
    }
    std::memcpy(k_rope.at(row, 0), scales + blocks * static_cast<std::int64_t>(sizeof(float)),
                static_cast<std::size_t>(k_rope.dim * kElement));
  }
}

CompressedRows latent_rows_at(std::byte* rows, std::int64_t row_stride, int latent_dim, int rope_dim) {
  CompressedRows streams;
  const RowShape shape{Dtype::kBf16, 1, latent_dim + rope_dim};
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(latent_format(rope_dim), shape)) {
    streams.streams[at++] = {rows, row_stride, row_stride};
    rows += stream.token_bytes(shape.dtype);
  }
  return streams;
}

CompressedCache latent_cache(std::byte* rows, int latent_dim, int rope_dim, std::int64_t pages,
                             std::int64_t page_size) {
  const std::int64_t bytes = latent_row_bytes(latent_dim, rope_dim);
  return latent_cache(rows, latent_dim, rope_dim, pages, page_size, page_size * bytes, bytes);
}

CompressedCache latent_cache(std::byte* rows, int latent_dim, int rope_dim, std::int64_t pages, std::int64_t page_size,
                             std::int64_t page_stride, std::int64_t token_stride) {
  CompressedCache cache{latent_format(rope_dim), {Dtype::kBf16, 1, latent_dim + rope_dim}, pages, page_size, {}, {}};
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(cache.format, cache.shape)) {
    cache.streams[at++] = {rows, page_stride, token_stride, token_stride};
    rows += stream.token_bytes(cache.shape.dtype);
  }
  return cache;
}

void quantize_latent_rows(const TensorView& latent, const TensorView& k_rope, std::byte* rows,
                          std::int64_t row_stride) {
  check_views(latent, k_rope, row_stride);
  const std::int64_t blocks = latent.dim / kLatentScaleBlock;
  for (std::int64_t row = 0; row < latent.tokens; ++row, rows += row_stride) {
    std::byte* const scales = rows + latent.dim;
    const std::byte* source = latent.at(row, 0);
    for (std::int64_t block = 0; block < blocks; ++block, source += kLatentScaleBlock * kElement) {
      std::uint16_t elements[kLatentScaleBlock];
      std::memcpy(elements, source, sizeof(elements));
      float greatest = 0.0F;
      for (const std::uint16_t element : elements) {
        greatest = std::max(greatest, std::abs(bf16_to_float(element)));  // ignores NaN
      }
      const float scale = scale_of(greatest, kMaxE4m3);
      std::byte* const quantized = rows + block * kLatentScaleBlock;
      for (std::int64_t i = 0; i < kLatentScaleBlock; ++i) {
        quantized[i] = std::byte{quantize_to_fp8(bf16_to_float(elements[i]), scale)};
      }
      std::memcpy(scales + block * static_cast<std::int64_t>(sizeof(float)), &scale, sizeof(float));
    }
    std::memcpy(scales + blocks * static_cast<std::int64_t>(sizeof(float)), k_rope.at(row, 0),
                static_cast<std::size_t>(k_rope.dim * kElement));
  }
}

}  // namespace ringattn
