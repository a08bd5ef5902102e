// SPDX-License-Identifier: Apache-2.0
// Storage formats of key and value rows: plain or compressed. A compressed tensor stands for the tensor that its
// decompression gives, with each element rounded once to the tensor's dtype. Every op sees that tensor, wherever it is
// decompressed. Quantization scales are never folded into the scale of scores.
//
// A format has streams and tables. A stream stores [tokens, heads, width] elements of one type. Streams are laid out in
// rows or pages like keys, and are sent around the ring. Tables belong to the whole tensor and are replicated on every
// rank. quant/row_quantization.hpp has the arithmetic.
//
//   format          streams                                          tables
//   plain           rows [heads, dim]
//   fp8             codes E4M3 [heads, dim],                         scales F32 [1] or [heads]
//                   with token_head also scales F32 [heads, 1]
//   int8            codes I8 [heads, dim], scales F32 [heads, 1]
//   int4_channel    codes U8 [heads, dim / 2],                       tail [sequences, group, heads, dim]
//                   scales [heads, 2 · dim / group]
//   int4_token      codes U8 [heads, dim / 2],
//                   scales [heads, 2 · dim / group]
//   low_rank        factors [heads / g, rank]                        basis [heads / g, rank, g · dim]
//   vector          codes U8 [heads, dim / width]                    codebook [heads, dim / width, 256, width]
//   hybrid          factors [heads, rank], codes U8 [heads, dim / 2],  basis [heads, rank, dim],
//                   scales [heads, 2 · dim / group],                 outlier_channels I32 [heads, outliers]
//                   outliers [heads, outliers]
//   latent          codes E4M3 [heads, dim − rope], scales F32 [heads, (dim − rope) / 128], rotary [heads, rope]
//
// With low_rank, `heads` = g heads share a basis (g is 1 by default): a group's row is the concatenation of its heads'
// rows (low_rank_shape()).
//
// `codes` are quantized values, or codebook indices of vector. Elements without a stated type have the tensor's dtype,
// bf16 or fp16. The `scales` of 4-bit formats are (scale, zero point) pairs. int4_token and hybrid have a pair for each
// run of `group` channels of a token. int4_channel has a pair for each channel and each `group` tokens of a sequence,
// stored in the rows of these tokens (scale_offset_of()). The tail holds the tokens after a sequence's last full group
// uncompressed, token t at t % group. The quantized values and scales of these tokens are not read.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"

namespace ringattn {

enum class RowEncoding : std::uint8_t {
  kPlain,
  kFp8,
  kInt8,
  kInt4Channel,  // KIVI's keys: a scale per channel
  kInt4Token,    // KIVI's values: a scale per token
  kLowRank,
  kVector,
  kHybrid,  // low rank, a 4-bit per-token remainder, and uncompressed outlier channels
  kLatent,  // FlashMLA's FP8 latent: e4m3, a scale per 128 channels, and an uncompressed rotary key
            // (quant/latent_rows.hpp)
};

// Granularity of fp8 scales.
enum class ScaleGrain : std::uint8_t { kTensor, kHead, kTokenHead };

// An encoding and its parameters. Unused parameters keep their defaults.
struct RowFormat {
  RowEncoding encoding = RowEncoding::kPlain;
  ScaleGrain scales = ScaleGrain::kTokenHead;  // kFp8
  int group = 0;     // 4-bit formats: tokens (kInt4Channel: 32 or 64) or channels (32) per scale
  int rank = 0;      // kLowRank and kHybrid: a multiple of 8
  int width = 0;     // kVector: channels per codebook index, 2, 4 or 8
  int outliers = 0;  // kHybrid: uncompressed channels per head, an even number
  int rope = 0;      // kLatent: the last channels, which stay uncompressed; a multiple of 4
  int heads = 1;     // kLowRank: heads that share a basis

  bool is_plain() const { return encoding == RowEncoding::kPlain; }
  bool operator==(const RowFormat&) const = default;
};

// Formats of a KV cache's two tensors.
struct CacheFormat {
  RowFormat k;
  RowFormat v;

  bool is_plain() const { return k.is_plain() && v.is_plain(); }
  bool operator==(const CacheFormat&) const = default;
};

// Shape of a key or value tensor, without tokens.
struct RowShape {
  Dtype dtype = Dtype::kBf16;  // dtype of the decompressed tensor
  std::int64_t heads = 0;
  std::int64_t dim = 0;

  bool operator==(const RowShape&) const = default;
};

// Element types of streams and tables.
enum class StoredType : std::uint8_t { kDtype, kF32, kE4m3, kI8, kU8, kI32 };
std::int64_t size_of(StoredType type, Dtype dtype);

// One stream. Per token: [heads, width].
struct FormatStream {
  std::string_view name;  // "codes" is the tensor "k_codes" of a file
  StoredType type = StoredType::kDtype;
  std::int64_t heads = 0;
  std::int64_t width = 0;  // elements

  std::int64_t token_bytes(Dtype dtype) const { return heads * width * size_of(type, dtype); }
  bool operator==(const FormatStream&) const = default;
};

// One table.
struct FormatTable {
  std::string_view name;  // "scales", "basis"
  StoredType type = StoredType::kDtype;
  std::vector<std::int64_t> shape;

  std::int64_t bytes(Dtype dtype) const;
  bool operator==(const FormatTable&) const = default;
};

inline constexpr int kMaxStreams = 4;
inline constexpr int kMaxTables = 2;

// The shape of the rows that share a basis: a group of heads counts as one head with the channels of all its heads.
RowShape low_rank_shape(const RowFormat& format, const RowShape& shape);

// Streams and tables in the order of the table above. `sequences` is the batch's, for tails.
std::vector<FormatStream> format_streams(const RowFormat& format, const RowShape& shape);
std::vector<FormatTable> format_tables(const RowFormat& format, const RowShape& shape, std::int64_t sequences);

// Bytes of all streams for one token, and of all tables.
std::int64_t token_bytes(const RowFormat& format, const RowShape& shape);
std::int64_t table_bytes(const RowFormat& format, const RowShape& shape, std::int64_t sequences);

// Whether a token's quantized values depend on that token only. False for kInt4Channel, which quantizes a full group of
// tokens at a time.
bool quantized_per_token(const RowFormat& format);

// Table of the encodings.
struct RowEncodingEntry {
  RowEncoding encoding;
  std::string_view name;   // in files and messages: "fp8", "int4_channel"
  std::string_view about;  // one line for people
  // Contradictions between the format and the tensor's shape, one string each. Empty: they match.
  std::vector<std::string> (*missing)(const RowFormat& format, const RowShape& shape);
};
std::span<const RowEncodingEntry> row_encodings();
const RowEncodingEntry& entry_of(RowEncoding encoding);

// "fp8 token_head", "int4_channel group 32", "hybrid rank 16 group 32 outliers 4", "low_rank rank 64 heads 2": the text
// in a file's metadata. `heads 1` is omitted.
std::string describe(const RowFormat& format);
// Parses describe()'s text. Throws kUsage for text that is not a format, with the known ones. Does not check the shape.
RowFormat parse_row_format(std::string_view text);
// One text if both are the same: "fp8 token_head". Else "k int4_channel group 32, v int4_token group 32".
std::string describe(const CacheFormat& format);

// Throws kUsage unless the format supports this tensor. Unsupported are fp32, dims that groups do not divide, and ranks
// above the dim. `tensor` is its name.
void check_format(std::string_view tensor, const RowFormat& format, const RowShape& shape);

}  // namespace ringattn
