// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/row_codec.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/quant/latent_rows.hpp"
#include "kernels/quant/quant_ops.hpp"
#include "kernels/quant/row_codec_ops.hpp"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn {

namespace {

float dtype_max(Dtype dtype) { return dtype == Dtype::kBf16 ? 0x1.fep127F : 65504.0F; }

float truncated(float value, Dtype dtype) {
  return dtype == Dtype::kBf16 ? truncated_to_bf16(value) : truncated_to_f16(value);
}

float rounded(float value, Dtype dtype) {
  return dtype == Dtype::kBf16 ? bf16_to_float(float_to_bf16(value)) : f16_to_float(float_to_f16(value));
}

void narrow(const float* wide, Dtype dtype, std::int64_t count, std::byte* row) {
  if (dtype == Dtype::kBf16) {
    best_row_codec_ops().narrow_to_bf16(wide, count, row);
  } else {
    auto* const words = reinterpret_cast<std::uint16_t*>(row);
    for (std::int64_t i = 0; i < count; ++i) words[i] = float_to_f16(wide[i]);
  }
}

float float_at(const std::byte* address) {
  float value = 0.0F;
  std::memcpy(&value, address, sizeof value);
  return value;
}

const float* e4m3_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (std::size_t value = 0; value < table.size(); ++value) {
      table[value] = e4m3_to_float(static_cast<std::uint8_t>(value));
    }
    return table;
  }();
  return values.data();
}

// Address of a stream's row for writing.
std::byte* to_write(const std::byte* row) { return const_cast<std::byte*>(row); }

}  // namespace

void widen_row(const std::byte* row, Dtype dtype, std::int64_t count, float* wide) {
  const auto* const words = reinterpret_cast<const std::uint16_t*>(row);
  if (dtype == Dtype::kBf16) {
    for (std::int64_t i = 0; i < count; ++i) wide[i] = bf16_to_float(words[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) wide[i] = f16_to_float(words[i]);
  }
}

RowCodec::RowCodec(const RowFormat& format, const RowShape& shape, std::span<std::byte* const> tables)
    : format_(format),
      dtype_(shape.dtype),
      heads_(shape.heads),
      dim_(shape.dim),
      tables_(tables),
      ops_(best_row_codec_ops()),
      wide_(static_cast<std::size_t>(shape.dim)),
      products_(wide_.size()),
      scales_(wide_.size()),
      zeros_(wide_.size()),
      pairs_(2 * wide_.size()) {}

std::byte* RowCodec::tail_at(std::int64_t sequence, std::int64_t token, std::int64_t head) const {
  return tables_[0] +
         ((sequence * format_.group + token % format_.group) * heads_ + head) * static_cast<std::int64_t>(row_bytes());
}

const std::int32_t* RowCodec::outlier_channels(std::int64_t head) const {
  return reinterpret_cast<const std::int32_t*>(tables_[1]) + head * format_.outliers;
}

float RowCodec::fp8_scale(const StreamRowAt& row_at, std::int64_t token, std::int64_t head) const {
  if (format_.scales == ScaleGrain::kTokenHead) return float_at(row_at(1, token));
  return float_at(tables_[0] + (format_.scales == ScaleGrain::kHead ? 4 * head : 0));
}

float RowCodec::absmax() const {
  // Magnitudes have the same order as their bit patterns, with NaN above all.
  std::uint32_t bits = 0;
  for (const float value : wide_) bits = std::max(bits, std::bit_cast<std::uint32_t>(value) & 0x7fffffffU);
  return std::bit_cast<float>(bits);
}

void RowCodec::load_codebook(std::int64_t head) {
  const std::int64_t entries = kCodebookVectors * dim_;
  codebook_.resize(static_cast<std::size_t>(entries));
  std::vector<float> vectors(codebook_.size());
  widen_row(tables_[0] + head * entries * static_cast<std::int64_t>(size_of(dtype_)), dtype_, entries, vectors.data());
  const std::int64_t width = format_.width;
  for (std::int64_t run = 0; run < dim_ / width; ++run) {
    for (std::int64_t vector = 0; vector < kCodebookVectors; ++vector) {
      for (std::int64_t i = 0; i < width; ++i) {
        codebook_[static_cast<std::size_t>((run * width + i) * kCodebookVectors + vector)] =
            vectors[static_cast<std::size_t>((run * kCodebookVectors + vector) * width + i)];
      }
    }
  }
}

void RowCodec::read_group(const StreamRowAt& row_at, std::int64_t group) {
  const std::int64_t pairs = dim_ / format_.group;
  for (std::int64_t t = 0; t < format_.group; ++t) {
    widen_row(row_at(1, group * format_.group + t), dtype_, 2 * pairs, pairs_.data() + 2 * t * pairs);
  }
  for (std::int64_t c = 0; c < dim_; ++c) {
    scales_[static_cast<std::size_t>(c)] = pairs_[static_cast<std::size_t>(2 * c)];
    zeros_[static_cast<std::size_t>(c)] = pairs_[static_cast<std::size_t>(2 * c + 1)];
  }
}

void RowCodec::read_scale_zero_pairs(const std::byte* row) {
  widen_row(row, dtype_, 2 * (dim_ / format_.group), pairs_.data());
  for (std::int64_t c = 0; c < dim_; ++c) {
    const std::int64_t pair = c / format_.group;
    scales_[static_cast<std::size_t>(c)] = pairs_[static_cast<std::size_t>(2 * pair)];
    zeros_[static_cast<std::size_t>(c)] = pairs_[static_cast<std::size_t>(2 * pair + 1)];
  }
}

void RowCodec::decompress(const StreamRowAt& row_at, std::int64_t sequence, std::int64_t position, std::int64_t rows,
                          std::int64_t keys, std::int64_t head, std::byte* plain, std::int64_t stride) {
  const bool by_token = quantized_per_token(format_);
  const std::int64_t closed = by_token ? keys : full_group_tokens(keys, format_.group);
  std::int64_t group = -1;
  for (std::int64_t i = 0; i < rows; ++i, plain += stride) {
    const std::int64_t token = position + i;
    if (token >= closed) {
      std::memcpy(plain, tail_at(sequence, token, head), row_bytes());
      continue;
    }
    if (!by_token && token / format_.group != group) {
      group = token / format_.group;
      read_group(row_at, group);
    }
    decompress_row(row_at, token, head, plain);
  }
}

void RowCodec::decompress_row(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, std::byte* plain) {
  switch (format_.encoding) {
    case RowEncoding::kPlain:
      std::memcpy(plain, row_at(0, token), row_bytes());
      return;
    case RowEncoding::kFp8:
      ops_.dequantize_fp8(row_at(0, token), fp8_scale(row_at, token, head), dim_, wide_.data());
      break;
    case RowEncoding::kInt8:
      ops_.dequantize_int8(row_at(0, token), float_at(row_at(1, token)), dim_, wide_.data());
      break;
    case RowEncoding::kInt4Token:
      dequantize_int4_groups(row_at(0, token), row_at(1, token));
      break;
    case RowEncoding::kInt4Channel:
      dequantize_int4_row(row_at(0, token));
      break;
    case RowEncoding::kVector: {
      const std::byte* const quantized = row_at(0, token);
      const auto vector_bytes = format_.width * static_cast<std::int64_t>(size_of(dtype_));
      const std::int64_t runs = dim_ / format_.width;
      for (std::int64_t run = 0; run < runs; ++run) {
        const std::int64_t vector =
            (head * runs + run) * kCodebookVectors + std::to_integer<std::int64_t>(quantized[run]);
        std::memcpy(plain + run * vector_bytes, tables_[0] + vector * vector_bytes,
                    static_cast<std::size_t>(vector_bytes));
      }
      return;
    }
    case RowEncoding::kHybrid:
      decompress_hybrid(row_at, token, head, plain);
      return;
    case RowEncoding::kLatent:
      decompress_latent(row_at, token, plain);
      return;
    case RowEncoding::kLowRank:  // the products are the elements
      return;
  }
  narrow(wide_.data(), dtype_, dim_, plain);
}

void RowCodec::decompress_latent(const StreamRowAt& row_at, std::int64_t token, std::byte* plain) {
  const std::byte* const quantized = row_at(0, token);
  const std::byte* const scales = row_at(1, token);
  const float* const values = e4m3_values();
  const std::int64_t coded = dim_ - format_.rope;
  for (std::int64_t c = 0; c < coded; ++c) {
    wide_[static_cast<std::size_t>(c)] = values[std::to_integer<std::size_t>(quantized[c])] *
                                         float_at(scales + c / kLatentScaleBlock * std::int64_t{sizeof(float)});
  }
  narrow(wide_.data(), dtype_, coded, plain);
  const auto element = static_cast<std::int64_t>(size_of(dtype_));
  std::memcpy(plain + coded * element, row_at(2, token), static_cast<std::size_t>(format_.rope * element));
}

void RowCodec::dequantize_int4_row(const std::byte* quantized) {
  ops_.dequantize_int4(quantized, scales_.data(), zeros_.data(), dim_, wide_.data());
}

// As read_scale_zero_pairs() and dequantize_int4_row().
void RowCodec::dequantize_int4_groups(const std::byte* quantized, const std::byte* pairs) {
  if (format_.group % 8 != 0) {
    read_scale_zero_pairs(pairs);
    return dequantize_int4_row(quantized);
  }
  widen_row(pairs, dtype_, 2 * (dim_ / format_.group), pairs_.data());
  for (std::int64_t c = 0, group = 0; c < dim_; c += format_.group, ++group) {
    const float* const pair = pairs_.data() + 2 * group;
    ops_.dequantize_int4_group(quantized + c / 2, pair[0], pair[1], format_.group, wide_.data() + c);
  }
}

void RowCodec::decompress_hybrid(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, std::byte* plain) {
  widen_row(plain, dtype_, dim_, products_.data());
  read_scale_zero_pairs(row_at(2, token));
  dequantize_int4_row(row_at(1, token));
  for (std::size_t c = 0; c < wide_.size(); ++c) {
    wide_[c] = hybrid_element(products_[c], wide_[c], dtype_max(dtype_));
  }
  narrow(wide_.data(), dtype_, dim_, plain);
  const std::byte* const kept = row_at(3, token);
  const std::int32_t* const channels = outlier_channels(head);
  for (std::int64_t i = 0; i < format_.outliers; ++i) std::memcpy(plain + 2 * channels[i], kept + 2 * i, 2);
}

void RowCodec::compress(const StreamRowAt& row_at, std::int64_t sequence, std::int64_t position, std::int64_t rows,
                        std::int64_t keys, std::int64_t head, const ElementsAt& plain_at,
                        const ElementsAt& products_at) {
  if (format_.encoding == RowEncoding::kInt4Channel) {
    const std::int64_t closed = std::min(position + rows, full_group_tokens(keys, format_.group));
    for (std::int64_t token = position; token < closed; token += format_.group) compress_group(row_at, token, plain_at);
    for (std::int64_t token = std::max(position, closed); token < position + rows; ++token) {
      std::memcpy(tail_at(sequence, token, head), plain_at(token), row_bytes());
      std::memset(to_write(row_at(0, token)), 0, static_cast<std::size_t>(dim_ / 2));
      std::memset(to_write(row_at(1, token)), 0,
                  static_cast<std::size_t>(2 * (dim_ / format_.group)) * size_of(dtype_));
    }
    return;
  }
  if (format_.encoding == RowEncoding::kVector) load_codebook(head);
  for (std::int64_t token = position; token < position + rows; ++token) {
    compress_row(row_at, token, head, plain_at(token), products_at);
  }
}

void RowCodec::compress_row(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, const std::byte* plain,
                            const ElementsAt& products_at) {
  widen_row(plain, dtype_, dim_, wide_.data());
  switch (format_.encoding) {
    case RowEncoding::kPlain:
      std::memcpy(to_write(row_at(0, token)), plain, row_bytes());
      break;
    case RowEncoding::kFp8:
      compress_fp8(row_at, token, head);
      break;
    case RowEncoding::kInt8:
      compress_int8(row_at, token);
      break;
    case RowEncoding::kInt4Token:
      compress_scale_zero_pairs(wide_.data(), row_at(0, token), row_at(1, token));
      break;
    case RowEncoding::kVector:
      compress_vectors(row_at(0, token));
      break;
    case RowEncoding::kHybrid:
      compress_hybrid(row_at, token, head, plain, products_at(token));
      break;
    case RowEncoding::kLatent:
      compress_latent(row_at, token, plain);
      break;
    case RowEncoding::kInt4Channel:  // quantized by group
    case RowEncoding::kLowRank:      // computed by a GEMM
      break;
  }
}

void RowCodec::compress_fp8(const StreamRowAt& row_at, std::int64_t token, std::int64_t head) {
  if (format_.scales == ScaleGrain::kTokenHead) {
    const float scale = row_scale_of(absmax(), kMaxE4m3, dtype_max(dtype_));
    std::memcpy(to_write(row_at(1, token)), &scale, sizeof scale);
  }
  const float scale = fp8_scale(row_at, token, head);
  std::byte* const quantized = to_write(row_at(0, token));
  for (std::int64_t c = 0; c < dim_; ++c) {
    quantized[c] = std::byte{quantize_to_fp8(wide_[static_cast<std::size_t>(c)], scale)};
  }
}

void RowCodec::compress_int8(const StreamRowAt& row_at, std::int64_t token) {
  const float scale = row_scale_of(absmax(), kMaxInt8, dtype_max(dtype_));
  std::memcpy(to_write(row_at(1, token)), &scale, sizeof scale);
  auto* const quantized = reinterpret_cast<std::int8_t*>(to_write(row_at(0, token)));
  for (std::int64_t c = 0; c < dim_; ++c) quantized[c] = quantize_to_int8(wide_[static_cast<std::size_t>(c)], scale);
}

void RowCodec::compress_latent(const StreamRowAt& row_at, std::int64_t token, const std::byte* plain) const {
  std::byte* const quantized = to_write(row_at(0, token));
  std::byte* const scales = to_write(row_at(1, token));
  const std::int64_t coded = dim_ - format_.rope;
  for (std::int64_t first = 0; first < coded; first += kLatentScaleBlock) {
    const float* const block = wide_.data() + first;
    float block_absmax = 0.0F;
    for (std::int64_t i = 0; i < kLatentScaleBlock; ++i) block_absmax = std::max(block_absmax, std::abs(block[i]));
    const float scale = scale_of(block_absmax, kMaxE4m3);
    std::memcpy(scales + first / kLatentScaleBlock * std::int64_t{sizeof scale}, &scale, sizeof scale);
    for (std::int64_t i = 0; i < kLatentScaleBlock; ++i)
      quantized[first + i] = std::byte{quantize_to_fp8(block[i], scale)};
  }
  const auto element = static_cast<std::int64_t>(size_of(dtype_));
  std::memcpy(to_write(row_at(2, token)), plain + coded * element, static_cast<std::size_t>(format_.rope * element));
}

void RowCodec::compress_vectors(const std::byte* quantized) const {
  const CodebookOps& ops = best_codebook_ops();
  for (std::int64_t run = 0; run < dim_ / format_.width; ++run) {
    const std::int64_t first = run * format_.width;
    const float* const vectors = codebook_.data() + first * kCodebookVectors;
    to_write(quantized)[run] = static_cast<std::byte>(ops.nearest(wide_.data() + first, vectors, format_.width));
  }
}

void RowCodec::compress_hybrid(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, const std::byte* plain,
                               const std::byte* products) {
  widen_row(products, dtype_, dim_, products_.data());
  for (std::size_t c = 0; c < wide_.size(); ++c) wide_[c] -= products_[c];
  std::byte* const kept = to_write(row_at(3, token));
  const std::int32_t* const channels = outlier_channels(head);
  for (std::int64_t i = 0; i < format_.outliers; ++i) {
    wide_[static_cast<std::size_t>(channels[i])] = 0.0F;
    std::memcpy(kept + 2 * i, plain + 2 * channels[i], 2);
  }
  compress_scale_zero_pairs(wide_.data(), row_at(1, token), row_at(2, token));
}

void RowCodec::compress_group(const StreamRowAt& row_at, std::int64_t first, const ElementsAt& plain_at) {
  const std::int64_t group = format_.group;
  group_.resize(static_cast<std::size_t>(group * dim_));
  for (std::int64_t t = 0; t < group; ++t) widen_row(plain_at(first + t), dtype_, dim_, group_.data() + t * dim_);
  for (std::int64_t c = 0; c < dim_; ++c) {
    float minimum = group_[static_cast<std::size_t>(c)];
    float maximum = minimum;
    for (std::int64_t t = 1; t < group; ++t) {
      const float element = group_[static_cast<std::size_t>(t * dim_ + c)];
      minimum = std::min(minimum, element);
      maximum = std::max(maximum, element);
    }
    const auto at = static_cast<std::size_t>(c);
    zeros_[at] = int4_zero_point(minimum);
    scales_[at] = truncated(int4_scale(zeros_[at], maximum), dtype_);
    pairs_[2 * at] = scales_[at];
    pairs_[2 * at + 1] = zeros_[at];
  }
  const std::int64_t pairs = dim_ / group;
  for (std::int64_t t = 0; t < group; ++t) {
    narrow(pairs_.data() + 2 * t * pairs, dtype_, 2 * pairs, to_write(row_at(1, first + t)));
    quantize_int4_row(group_.data() + t * dim_, row_at(0, first + t));
  }
}

void RowCodec::compress_scale_zero_pairs(const float* elements, const std::byte* quantized, const std::byte* pairs) {
  const std::int64_t group = format_.group;
  for (std::int64_t run = 0; run < dim_ / group; ++run) {
    const auto [minimum, maximum] = std::minmax_element(elements + run * group, elements + (run + 1) * group);
    const float zero = int4_zero_point(rounded(*minimum, dtype_));
    const float scale = truncated(int4_scale(zero, *maximum), dtype_);
    pairs_[static_cast<std::size_t>(2 * run)] = scale;
    pairs_[static_cast<std::size_t>(2 * run + 1)] = zero;
    for (std::int64_t c = run * group; c < (run + 1) * group; ++c) {
      scales_[static_cast<std::size_t>(c)] = scale;
      zeros_[static_cast<std::size_t>(c)] = zero;
    }
  }
  narrow(pairs_.data(), dtype_, 2 * (dim_ / group), to_write(pairs));
  quantize_int4_row(elements, quantized);
}

void RowCodec::quantize_int4_row(const float* elements, const std::byte* quantized) const {
  const auto value = [&](std::int64_t c) {
    const auto at = static_cast<std::size_t>(c);
    return quantize_to_int4(elements[c], scales_[at], zeros_[at]);
  };
  for (std::int64_t c = 0; c < dim_; c += 2) to_write(quantized)[c / 2] = std::byte{int4_pair(value(c), value(c + 1))};
}

}  // namespace ringattn
