// SPDX-License-Identifier: Apache-2.0
// How the rows of a tensor of keys or values are stored: as they are, or compressed. A compressed tensor *is* the
// tensor that its decompression gives, each element rounded once to the tensor's dtype: every op sees that tensor and
// nothing else, wherever it is decompressed, and scales of codes never reach the scale of scores.
//
// A format has two kinds of parts. Streams hold something of each token, [tokens, heads, width] of one element type:
// they lie in rows or in pages as keys do, and travel around the ring. Tables belong to the whole tensor and are on
// every rank. row_quantization.hpp has the arithmetic.
//
//   format          streams                                          tables
//   plain           rows [heads, dim]
//   fp8             codes E4M3 [heads, dim],                         scales F32 [1] or [heads]
//                   of token_head also scales F32 [heads, 1]
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
// The heads of low_rank are cut into groups of g = `heads`, one unless a format says otherwise: a row of a group is
// those of its heads, side by side (low_rank_shape()).
//
// Where no type is said it is the tensor's dtype, bf16 or fp16. Two numbers of `scales` of 4-bit codes are a scale and
// a zero. Those of int4_token and hybrid are of a token's runs of `group` channels; those of int4_channel are of a
// channel over `group` tokens of a sequence, and lie in the rows of these tokens (scale_offset_of()). The tail has the
// tokens of a sequence behind its last full group as they are, token t at t % group; their codes and scales are not
// read.
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
  kInt4Channel,  // as KIVI has keys: a scale for each channel
  kInt4Token,    // as KIVI has values: a scale for each token
  kLowRank,
  kVector,
  kHybrid,  // low rank, a remainder of 4 bits per token, and some channels as they are
  kLatent,  // 8 bits with a scale for each 128 channels, and a rotary key behind them as it is (latent_rows.hpp)
};

// What shares a scale of fp8.
enum class ScaleGrain : std::uint8_t { kTensor, kHead, kTokenHead };

// A row of the table of encodings with its numbers. Those that a encoding doesn't use are as they are here.
struct RowFormat {
  RowEncoding encoding = RowEncoding::kPlain;
  ScaleGrain scales = ScaleGrain::kTokenHead;  // of kFp8
  int group = 0;     // of 4 bits: tokens (kInt4Channel: 32 or 64) or channels (32) that share a scale
  int rank = 0;      // of kLowRank and kHybrid: a multiple of 8
  int width = 0;     // of kVector: channels of a code, 2, 4 or 8
  int outliers = 0;  // of kHybrid: channels of a head that are kept, an even number
  int rope = 0;      // of kLatent: the last channels, which are kept; a multiple of 4
  int heads = 1;     // of kLowRank: that have a basis in common

  bool is_plain() const { return encoding == RowEncoding::kPlain; }
  bool operator==(const RowFormat&) const = default;
};

// Formats of a cache's two tensors.
struct CacheFormat {
  RowFormat k;
  RowFormat v;

  bool is_plain() const { return k.is_plain() && v.is_plain(); }
  bool operator==(const CacheFormat&) const = default;
};

// A tensor of keys or values.
struct RowShape {
  Dtype dtype = Dtype::kBf16;  // of what decompression gives
  std::int64_t heads = 0;
  std::int64_t dim = 0;

  bool operator==(const RowShape&) const = default;
};

// Elements of streams and tables.
enum class StoredType : std::uint8_t { kDtype, kF32, kE4m3, kI8, kU8, kI32 };
std::int64_t size_of(StoredType type, Dtype dtype);

// What a stream holds of a token: [heads, width].
struct FormatStream {
  std::string_view name;  // "codes": the tensor "k_codes" of a file
  StoredType type = StoredType::kDtype;
  std::int64_t heads = 0;
  std::int64_t width = 0;  // elements

  std::int64_t token_bytes(Dtype dtype) const { return heads * width * size_of(type, dtype); }
  bool operator==(const FormatStream&) const = default;
};

// A table that is there once.
struct FormatTable {
  std::string_view name;  // "scales", "basis"
  StoredType type = StoredType::kDtype;
  std::vector<std::int64_t> shape;

  std::int64_t bytes(Dtype dtype) const;
  bool operator==(const FormatTable&) const = default;
};

inline constexpr int kMaxStreams = 4;
inline constexpr int kMaxTables = 2;

// What has a basis: of groups of heads a group as one head, with the channels of all of its heads.
RowShape low_rank_shape(const RowFormat& format, const RowShape& shape);

// In the order of the comment above. `sequences`: of the batch, for tails.
std::vector<FormatStream> format_streams(const RowFormat& format, const RowShape& shape);
std::vector<FormatTable> format_tables(const RowFormat& format, const RowShape& shape, std::int64_t sequences);

// Bytes of all streams for one token, and of all tables.
std::int64_t token_bytes(const RowFormat& format, const RowShape& shape);
std::int64_t table_bytes(const RowFormat& format, const RowShape& shape, std::int64_t sequences);

// Whether a token's codes are made from that token alone: all but kInt4Channel, of which a group of tokens closes at a
// time.
bool quantized_per_token(const RowFormat& format);

// One row for each encoding.
struct RowEncodingEntry {
  RowEncoding encoding;
  std::string_view name;   // as files and messages have it: "fp8", "int4_channel"
  std::string_view about;  // one line for people
  // What the format and the tensor's shape contradict, one entry each; empty: they fit.
  std::vector<std::string> (*missing)(const RowFormat& format, const RowShape& shape);
};
std::span<const RowEncodingEntry> row_encodings();
const RowEncodingEntry& entry_of(RowEncoding encoding);

// "fp8 token_head", "int4_channel group 32", "hybrid rank 16 group 32 outliers 4", "low_rank rank 64 heads 2": what a
// file's metadata says. Both ways; one head is left out.
std::string describe(const RowFormat& format);
// Throws kUsage for text that is no format, naming what is known; not what a shape has to fit.
RowFormat parse_row_format(std::string_view text);
// One text where both are the same: "fp8 token_head", else "k int4_channel group 32, v int4_token group 32".
std::string describe(const CacheFormat& format);

// Throws kUsage unless the format can hold such a tensor: fp32, dims that groups don't divide, ranks beyond the dim.
// `tensor` is its name.
void check_format(std::string_view tensor, const RowFormat& format, const RowShape& shape);

}  // namespace ringattn
