// SPDX-License-Identifier: Apache-2.0
// Rows of one head between elements and codes, on the host, one after the other. Tasks (compressed_rows.hpp) and the
// host's decode kernel cut their work into such rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/row_format.hpp"

namespace ringattn {

// `count` elements of bf16 or fp16 as fp32.
void widen_row(const std::byte* row, Dtype dtype, std::int64_t count, float* wide);

// Where the row of a stream lies, of one head, for the token at a position of a sequence.
using StreamRowAt = std::function<const std::byte*(int stream, std::int64_t position)>;
// Where a row of elements lies, of one head, for such a token.
using ElementsAt = std::function<const std::byte*(std::int64_t position)>;

// Has a thread's buffers. What it refers to outlives it.
class RowCodec {
 public:
  // `tables`: of the whole tensor, in the order of format_tables().
  RowCodec(const RowFormat& format, const RowShape& shape, std::span<std::byte* const> tables);

  // Tokens [position, position + rows) of a sequence of `keys` keys, wherever the rows of their group lie, become
  // elements of the tensor's dtype from `plain` on, `stride` bytes from row to row. Of kHybrid they add to the products
  // that are there.
  void decompress(const StreamRowAt& row_at, std::int64_t sequence, std::int64_t position, std::int64_t rows,
                  std::int64_t keys, std::int64_t head, std::byte* plain, std::int64_t stride);

  // The other way. What `row_at` names is written. Of kInt4Channel `position` begins a group, and tokens behind the
  // sequence's last full group go to its tail. `products_at`: of kHybrid.
  void compress(const StreamRowAt& row_at, std::int64_t sequence, std::int64_t position, std::int64_t rows,
                std::int64_t keys, std::int64_t head, const ElementsAt& plain_at, const ElementsAt& products_at);

 private:
  std::size_t row_bytes() const { return static_cast<std::size_t>(dim_) * size_of(dtype_); }
  std::byte* tail_at(std::int64_t sequence, std::int64_t token, std::int64_t head) const;
  const std::int32_t* outlier_channels(std::int64_t head) const;
  float fp8_scale(const StreamRowAt& row_at, std::int64_t token, std::int64_t head) const;
  float greatest_magnitude() const;
  void load_codebook(std::int64_t head);
  // Scale and zero of each channel: of a group of tokens, and of a token's runs of channels.
  void read_group(const StreamRowAt& row_at, std::int64_t group);
  void read_scale_zero_pairs(const std::byte* row);

  void decompress_row(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, std::byte* plain);
  void decompress_latent(const StreamRowAt& row_at, std::int64_t token, std::byte* plain);
  void decompress_hybrid(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, std::byte* plain);
  void dequantize_int4_row(const std::byte* codes);

  void compress_row(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, const std::byte* plain,
                    const ElementsAt& products_at);
  void compress_fp8(const StreamRowAt& row_at, std::int64_t token, std::int64_t head);
  void compress_int8(const StreamRowAt& row_at, std::int64_t token);
  void compress_latent(const StreamRowAt& row_at, std::int64_t token, const std::byte* plain) const;
  void compress_vectors(const std::byte* codes) const;
  void compress_hybrid(const StreamRowAt& row_at, std::int64_t token, std::int64_t head, const std::byte* plain,
                       const std::byte* products);
  void compress_group(const StreamRowAt& row_at, std::int64_t first, const ElementsAt& plain_at);
  // Numbers of a token, with a scale and a zero for each run of channels.
  void compress_scale_zero_pairs(const float* numbers, const std::byte* codes, const std::byte* pairs);
  void quantize_int4_row(const float* numbers, const std::byte* codes) const;

  const RowFormat& format_;
  Dtype dtype_;
  std::int64_t heads_;
  std::int64_t dim_;
  std::span<std::byte* const> tables_;
  std::vector<float> wide_, products_, scales_, zeros_;  // [dim]
  std::vector<float> pairs_;                             // [dim, 2]
  std::vector<float> group_;                             // [group, dim]
  std::vector<float> codebook_;                          // of a head: [dim, 256], a run's vectors channel by channel
};

}  // namespace ringattn
