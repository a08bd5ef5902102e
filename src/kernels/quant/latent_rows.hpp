// SPDX-License-Identifier: Apache-2.0
// 8-bit latents in the row layout of FlashMLA's FP8 KV cache and DeepSeek's. A token's row is, without padding,
//
//   latent_dim × e4m3       quantized latent (base/e4m3.hpp)
//   latent_dim / 128 × fp32 scales, one per block of 128 values
//   rope_dim × bf16         rotary key, not quantized
//
// For a latent of 512 and a rotary key of 64 a row has 656 bytes. An element of the latent is round_bf16(value ·
// scale): one product in fp32, then rounded to the nearest bf16, ties to even.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/tensor.hpp"
#include "kernels/mla/mla.hpp"
#include "kernels/quant/compressed_rows.hpp"

namespace ringattn {

inline constexpr std::int64_t kLatentScaleBlock = 128;  // values that share a scale

// Bytes of a row. Throws kUsage if latent_dim is not a positive multiple of 128, or rope_dim is negative.
std::int64_t latent_row_bytes(std::int64_t latent_dim, std::int64_t rope_dim);
inline std::int64_t latent_row_bytes(const MlaSpec& spec) { return latent_row_bytes(spec.latent_dim, spec.rope_dim); }

// Dequantizes rows at `rows`, `row_stride` bytes apart, of any alignment, to latent [rows, 1, latent_dim] and k_rope
// [rows, 1, rope_dim], both bf16. A NaN value or scale gives NaN. Throws kInternal if the views do not match each
// other.
void dequantize_latent_rows(const std::byte* rows, std::int64_t row_stride, const MutableTensorView& latent,
                            const MutableTensorView& k_rope);

// The RowFormat of such rows (kernels/quant/row_format.hpp): quantized latents, scales and rotary keys are its streams.
inline RowFormat latent_format(int rope_dim) { return {.encoding = RowEncoding::kLatent, .rope = rope_dim}; }
// Views of such rows, `row_stride` bytes apart, as streams of that format.
CompressedRows latent_rows_at(std::byte* rows, std::int64_t row_stride, int latent_dim, int rope_dim);
// A cache of such rows, [pages, page_size], which decompress to bf16. Dense, or with strides in bytes. Throws as
// latent_row_bytes() does.
CompressedCache latent_cache(std::byte* rows, int latent_dim, int rope_dim, std::int64_t pages, std::int64_t page_size);
CompressedCache latent_cache(std::byte* rows, int latent_dim, int rope_dim, std::int64_t pages, std::int64_t page_size,
                             std::int64_t page_stride, std::int64_t token_stride);

// Quantizes rows. A block's scale is its absolute max divided by 448 in fp32, or 1 if that is 0. A value is the element
// divided by the scale in fp32, rounded to e4m3. NaN is ignored in the absolute max and stays NaN. A block with ∞ has
// the scale ∞ and is dequantized to NaN.
void quantize_latent_rows(const TensorView& latent, const TensorView& k_rope, std::byte* rows, std::int64_t row_stride);

}  // namespace ringattn
