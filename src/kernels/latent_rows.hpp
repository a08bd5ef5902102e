// SPDX-License-Identifier: Apache-2.0
// Latents of 8 bits, in the rows of FlashMLA's and DeepSeek's caches. A token's row is, without gaps,
//
//   latent_dim × e4m3       codes of the latent (base/e4m3.hpp)
//   latent_dim / 128 × fp32 scales, one for each block of 128 codes
//   rope_dim × bf16         the rotary key, as it is
//
// 656 bytes for a latent of 512 and a rotary key of 64. An element of the latent is round_bf16(code · scale): one
// product in fp32, then to the nearest bf16, ties to even.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/tensor.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/mla.hpp"

namespace ringattn {

inline constexpr std::int64_t kLatentScaleBlock = 128;  // codes that share a scale

// Bytes of a row. Throws kUsage where latent_dim is no positive multiple of 128, or rope_dim is negative.
std::int64_t latent_row_bytes(std::int64_t latent_dim, std::int64_t rope_dim);
inline std::int64_t latent_row_bytes(const MlaSpec& spec) { return latent_row_bytes(spec.latent_dim, spec.rope_dim); }

// Reads the rows at `rows`, `row_stride` bytes apart, of any alignment: latent [rows, 1, latent_dim] and
// k_rope [rows, 1, rope_dim], both bf16. A NaN code or scale gives NaN. Throws kInternal where the views don't fit each
// other.
void dequantize_latent_rows(const std::byte* rows, std::int64_t row_stride, const MutableTensorView& latent,
                            const MutableTensorView& k_rope);

// How a cache stores such rows: of kernels/row_format.hpp, where codes, scales and rotary keys are streams.
inline RowFormat latent_format(int rope_dim) { return {.encoding = RowEncoding::kLatent, .rope = rope_dim}; }
// Such rows one behind the other, or `row_stride` bytes apart, as streams of that format.
CompressedRows latent_rows_at(std::byte* rows, std::int64_t row_stride, int latent_dim, int rope_dim);
// A cache of such rows, [pages, page_size], which become bf16: dense, or so many bytes apart. Throws as
// latent_row_bytes() does.
CompressedCache latent_cache(std::byte* rows, int latent_dim, int rope_dim, std::int64_t pages, std::int64_t page_size);
CompressedCache latent_cache(std::byte* rows, int latent_dim, int rope_dim, std::int64_t pages, std::int64_t page_size,
                             std::int64_t page_stride, std::int64_t token_stride);

// Writes such rows. A block's scale is its greatest magnitude divided by 448 in fp32, or 1 where that is 0; a code is
// the element divided by the scale in fp32, rounded to e4m3. NaN counts for no magnitude and stays NaN; a block with ∞
// has the scale ∞ and comes back as NaN.
void quantize_latent_rows(const TensorView& latent, const TensorView& k_rope, std::byte* rows, std::int64_t row_stride);

}  // namespace ringattn
