// SPDX-License-Identifier: Apache-2.0
// Compresses and decompresses rows of one head, one after the other, on the host. Tasks (quant/compressed_rows.hpp) and
// the CPU decode kernel divide their work into such rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/quant/row_codec_ops.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn {

// Converts `count` bf16 or fp16 elements to fp32.
void widen_row(const std::byte* row, Dtype dtype, std::int64_t count, float* wide);

// Returns the address of one head's row of a stream, for the token at a position of a sequence.
using StreamRowAt = std::function<const std::byte*(int stream, std::int64_t position)>;
// Returns the address of one head's row of elements, for such a token.
using ElementsAt = std::function<const std::byte*(std::int64_t position)>;

// Has one thread's buffers. The constructor's arguments must outlive it.
class RowCodec {
 public:
  // `tables` are those of the whole tensor, in the order of format_tables().
  RowCodec(const RowFormat& format, const RowShape& shape, std::span<std::byte* const> tables);

  // Decompresses tokens [position, position + rows) of a sequence of `keys` keys to elements of the tensor's dtype at
  // `plain`, `stride` bytes between rows. `row_at` may be called for any token of their groups. kHybrid adds to the
  // products in `plain`.
  void decompress(const StreamRowAt& row_at, std::int64_t sequence, std::int64_t position, std::int64_t rows,
                  std::int64_t keys, std::int64_t head, std::byte* plain, std::int64_t stride);

  // Compresses the same tokens. Writes the rows that `row_at` returns. With kInt4Channel `position` begins a group, and
  // tokens after the sequence's last full group go to its tail. `products_at` is for kHybrid.
  void compress(const StreamRowAt& row_at, std::int64_t sequence, std::int64_t position, std::int64_t rows,
                std::int64_t keys, std::int64_t head, const ElementsAt& plain_at, const ElementsAt& products_at);

 private:
  std::size_t row_bytes() const { return static_cast<std::size_t>(dim_) * size_of(dtype_); }
  std::byte* tail_at(std::int64_t sequence, std::int64_t token, std::int64_t head) const;
  const std::int32_t* outlier_channels(std::int64_t head) const;
  float fp8_scale(const StreamRowAt& row_at, std::int64_t token, std::int64_t head) const;
  float absmax() const;
  void load_codebook(std::int64_t head);
  // Read the scale and zero point of each channel: of a group of tokens, or of a token's runs of channels.
  void read_group(const StreamRowAt& row_at, std::int64_t group);
  void read_scale_zero_pairs(const std::byte* row);

  void decompress_row(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, std::byte* plain);
  void decompress_latent(const StreamRowAt& row_at, std::int64_t token, std::byte* plain);
  void decompress_hybrid(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, std::byte* plain);
  void dequantize_int4_row(const std::byte* quantized);
  void dequantize_int4_groups(const std::byte* quantized, const std::byte* pairs);

  void compress_row(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, const std::byte* plain,
                    const ElementsAt& products_at);
  void compress_fp8(const StreamRowAt& row_at, std::int64_t token, std::int64_t head);
  void compress_int8(const StreamRowAt& row_at, std::int64_t token);
  void compress_latent(const StreamRowAt& row_at, std::int64_t token, const std::byte* plain) const;
  void compress_vectors(const std::byte* quantized) const;
  void compress_hybrid(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, const std::byte* plain,
                       const std::byte* products);
  void compress_group(const StreamRowAt& row_at, std::int64_t first, const ElementsAt& plain_at);
  // Quantizes a token's `elements`, with a scale and a zero point for each run of channels.
  void compress_scale_zero_pairs(const float* elements, const std::byte* quantized, const std::byte* pairs);
  void quantize_int4_row(const float* elements, const std::byte* quantized) const;

  const RowFormat& format_;
  Dtype dtype_;
  std::int64_t heads_;
  std::int64_t dim_;
  std::span<std::byte* const> tables_;
  const RowCodecOps& ops_;
  std::vector<float> wide_, products_, scales_, zeros_;  // [dim]
  std::vector<float> pairs_;                             // [dim, 2]
  std::vector<float> group_;                             // [group, dim]
  std::vector<float> codebook_;  // one head: [dim, 256], with each run's vectors stored channel by channel
};

}  // namespace ringattn
