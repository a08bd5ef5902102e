// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/row_format.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>

#include "base/error.hpp"
#include "base/quotes.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn {

namespace {

using Missing = std::vector<std::string>;

constexpr std::array<std::string_view, 3> kGrainNames{"tensor", "head", "token_head"};

void require(Missing& missing, bool fits, std::string what) {
  if (!fits) missing.push_back(std::move(what));
}

Missing nothing_missing(const RowFormat&, const RowShape&) { return {}; }

void require_pairs(Missing& missing, const RowFormat& format, const RowShape& shape) {
  require(missing, shape.dim % 2 == 0, fmt::format("dim {} (supported: even, two values per byte)", shape.dim));
  require(missing, format.group > 0 && shape.dim % format.group == 0,
          fmt::format("groups of {} in a dim of {} (supported: divisors)", format.group, shape.dim));
}

Missing int4_channel_missing(const RowFormat& format, const RowShape& shape) {
  Missing missing;
  require(missing, format.group == 32 || format.group == 64,
          fmt::format("groups of {} tokens (supported: 32 and 64)", format.group));
  require_pairs(missing, format, shape);
  return missing;
}

Missing int4_token_missing(const RowFormat& format, const RowShape& shape) {
  Missing missing;
  require(missing, format.group == 32, fmt::format("groups of {} channels (supported: 32)", format.group));
  require_pairs(missing, format, shape);
  return missing;
}

Missing low_rank_missing(const RowFormat& format, const RowShape& shape) {
  Missing missing;
  const bool divides = format.heads >= 1 && shape.heads % format.heads == 0;
  require(missing, divides, fmt::format("groups of {} of {} heads (supported: divisors)", format.heads, shape.heads));
  if (!divides) return missing;
  const std::int64_t dim = low_rank_shape(format, shape).dim;
  require(missing, format.rank >= 8 && format.rank % 8 == 0 && format.rank < dim,
          fmt::format("rank {} of a dim of {} (supported: multiples of 8 below it)", format.rank, dim));
  require(missing, shape.dim % 8 == 0, fmt::format("dim {} (supported: multiples of 8)", shape.dim));
  return missing;
}

Missing vector_missing(const RowFormat& format, const RowShape& shape) {
  Missing missing;
  require(missing, format.width == 2 || format.width == 4 || format.width == 8,
          fmt::format("vectors of {} channels (supported: 2, 4 and 8)", format.width));
  require(missing, format.width > 0 && shape.dim % format.width == 0,
          fmt::format("vectors of {} channels in a dim of {} (supported: divisors)", format.width, shape.dim));
  return missing;
}

Missing hybrid_missing(const RowFormat& format, const RowShape& shape) {
  Missing missing = low_rank_missing(format, shape);
  const Missing remainder = int4_token_missing(format, shape);
  missing.insert(missing.end(), remainder.begin(), remainder.end());
  require(missing, format.outliers >= 2 && format.outliers % 2 == 0 && format.outliers < shape.dim,
          fmt::format("{} outlier channels of {} (supported: even numbers from 2 on, below these)", format.outliers,
                      shape.dim));
  return missing;
}

Missing mla_missing(const RowFormat& format, const RowShape& shape) {
  Missing missing;
  require(missing, format.rope > 0 && format.rope % 4 == 0,
          fmt::format("{} rotary channels (supported: multiples of 4)", format.rope));
  require(missing, shape.dim > format.rope && (shape.dim - format.rope) % kLatentScaleBlock == 0,
          fmt::format("{} of {} channels quantized (supported: multiples of {})", shape.dim - format.rope, shape.dim,
                      kLatentScaleBlock));
  return missing;
}

constexpr RowEncodingEntry kEncodings[] = {
    {RowEncoding::kPlain, "plain", "not quantized", nothing_missing},
    {RowEncoding::kFp8, "fp8", "e4m3, a scale per tensor, per head or per token and head", nothing_missing},
    {RowEncoding::kInt8, "int8", "8-bit integers, a scale per token and head", nothing_missing},
    {RowEncoding::kInt4Channel, "int4_channel", "4-bit integers, scale and zero point per channel of 32 or 64 tokens",
     int4_channel_missing},
    {RowEncoding::kInt4Token, "int4_token", "4-bit integers, scale and zero point per 32 channels of a token",
     int4_token_missing},
    {RowEncoding::kLowRank, "low_rank", "rows of a head, or of a group of heads, as combinations of a few basis rows",
     low_rank_missing},
    {RowEncoding::kVector, "vector", "8-bit codebook indices for 2, 4 or 8 channels, codebooks of 256 vectors",
     vector_missing},
    {RowEncoding::kHybrid, "hybrid", "low rank, a 4-bit remainder per token, and outlier channels not quantized",
     hybrid_missing},
    {RowEncoding::kLatent, "latent", "e4m3, a scale per 128 channels of a token, and a rotary key not quantized",
     mla_missing},
};

// The parameters of a format by name, as far as its encoding uses them.
struct NamedNumber {
  std::string_view name;
  int RowFormat::*member;
};
constexpr NamedNumber kNumbers[] = {{"rank", &RowFormat::rank},
                                    {"group", &RowFormat::group},
                                    {"width", &RowFormat::width},
                                    {"outliers", &RowFormat::outliers},
                                    {"rope", &RowFormat::rope}};
// The parameter that may be omitted: it is then 1.
constexpr NamedNumber kHeads{"heads", &RowFormat::heads};

std::vector<NamedNumber> numbers_of(RowEncoding encoding) {
  switch (encoding) {
    case RowEncoding::kInt4Channel:
    case RowEncoding::kInt4Token:
      return {kNumbers[1]};
    case RowEncoding::kLowRank:
      return {kNumbers[0]};
    case RowEncoding::kVector:
      return {kNumbers[2]};
    case RowEncoding::kHybrid:
      return {kNumbers[0], kNumbers[1], kNumbers[3]};
    case RowEncoding::kLatent:
      return {kNumbers[4]};
    case RowEncoding::kPlain:
    case RowEncoding::kFp8:
    case RowEncoding::kInt8:
      break;
  }
  return {};
}

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    words.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return words;
}

[[noreturn]] void refuse_text(std::string_view text, const std::string& why) {
  std::vector<std::string_view> names;
  for (const RowEncodingEntry& entry : kEncodings) names.push_back(entry.name);
  fail(ErrorCode::kUsage, fmt::format("\"{}\" is not a storage format", shortened(text, 80)), why,
       fmt::format("This build knows {}.", fmt::join(names, ", ")));
}

}  // namespace

std::int64_t size_of(StoredType type, Dtype dtype) {
  switch (type) {
    case StoredType::kDtype:
      return static_cast<std::int64_t>(size_of(dtype));
    case StoredType::kF32:
    case StoredType::kI32:
      return 4;
    case StoredType::kE4m3:
    case StoredType::kI8:
    case StoredType::kU8:
      break;
  }
  return 1;
}

std::int64_t FormatTable::bytes(Dtype dtype) const {
  std::int64_t bytes = size_of(type, dtype);
  for (const std::int64_t length : shape) bytes *= length;
  return bytes;
}

RowShape low_rank_shape(const RowFormat& format, const RowShape& shape) {
  return {shape.dtype, shape.heads / format.heads, shape.dim * format.heads};
}

std::vector<FormatStream> format_streams(const RowFormat& format, const RowShape& shape) {
  const std::int64_t heads = shape.heads;
  const auto pairs = [&] {
    return std::vector<FormatStream>{{"codes", StoredType::kU8, heads, shape.dim / 2},
                                     {"scales", StoredType::kDtype, heads, 2 * (shape.dim / format.group)}};
  };
  switch (format.encoding) {
    case RowEncoding::kPlain:
      return {{"rows", StoredType::kDtype, heads, shape.dim}};
    case RowEncoding::kFp8:
      if (format.scales != ScaleGrain::kTokenHead) return {{"codes", StoredType::kE4m3, heads, shape.dim}};
      return {{"codes", StoredType::kE4m3, heads, shape.dim}, {"scales", StoredType::kF32, heads, 1}};
    case RowEncoding::kInt8:
      return {{"codes", StoredType::kI8, heads, shape.dim}, {"scales", StoredType::kF32, heads, 1}};
    case RowEncoding::kInt4Channel:
    case RowEncoding::kInt4Token:
      return pairs();
    case RowEncoding::kLowRank:
      return {{"factors", StoredType::kDtype, low_rank_shape(format, shape).heads, format.rank}};
    case RowEncoding::kVector:
      return {{"codes", StoredType::kU8, heads, shape.dim / format.width}};
    case RowEncoding::kHybrid: {
      std::vector<FormatStream> streams{{"factors", StoredType::kDtype, heads, format.rank}};
      for (const FormatStream& stream : pairs()) streams.push_back(stream);
      streams.push_back({"outliers", StoredType::kDtype, heads, format.outliers});
      return streams;
    }
    case RowEncoding::kLatent: {
      const std::int64_t coded = shape.dim - format.rope;
      return {{"codes", StoredType::kE4m3, heads, coded},
              {"scales", StoredType::kF32, heads, coded / kLatentScaleBlock},
              {"rotary", StoredType::kDtype, heads, format.rope}};
    }
  }
  return {};
}

std::vector<FormatTable> format_tables(const RowFormat& format, const RowShape& shape, std::int64_t sequences) {
  const std::int64_t heads = shape.heads;
  switch (format.encoding) {
    case RowEncoding::kFp8:
      if (format.scales == ScaleGrain::kTensor) return {{"scales", StoredType::kF32, {1}}};
      if (format.scales == ScaleGrain::kHead) return {{"scales", StoredType::kF32, {heads}}};
      break;
    case RowEncoding::kInt4Channel:
      return {{"tail", StoredType::kDtype, {sequences, format.group, heads, shape.dim}}};
    case RowEncoding::kLowRank: {
      const RowShape ranked = low_rank_shape(format, shape);
      return {{"basis", StoredType::kDtype, {ranked.heads, format.rank, ranked.dim}}};
    }
    case RowEncoding::kVector:
      return {{"codebook", StoredType::kDtype, {heads, shape.dim / format.width, kCodebookVectors, format.width}}};
    case RowEncoding::kHybrid:
      return {{"basis", StoredType::kDtype, {heads, format.rank, shape.dim}},
              {"outlier_channels", StoredType::kI32, {heads, format.outliers}}};
    case RowEncoding::kPlain:
    case RowEncoding::kInt8:
    case RowEncoding::kInt4Token:
    case RowEncoding::kLatent:
      break;
  }
  return {};
}

std::int64_t token_bytes(const RowFormat& format, const RowShape& shape) {
  std::int64_t bytes = 0;
  for (const FormatStream& stream : format_streams(format, shape)) bytes += stream.token_bytes(shape.dtype);
  return bytes;
}

std::int64_t table_bytes(const RowFormat& format, const RowShape& shape, std::int64_t sequences) {
  std::int64_t bytes = 0;
  for (const FormatTable& table : format_tables(format, shape, sequences)) bytes += table.bytes(shape.dtype);
  return bytes;
}

bool quantized_per_token(const RowFormat& format) { return format.encoding != RowEncoding::kInt4Channel; }

std::span<const RowEncodingEntry> row_encodings() { return kEncodings; }

const RowEncodingEntry& entry_of(RowEncoding encoding) {
  return *std::ranges::find(kEncodings, encoding, &RowEncodingEntry::encoding);
}

std::string describe(const RowFormat& format) {
  std::string text(entry_of(format.encoding).name);
  if (format.encoding == RowEncoding::kFp8) {
    text += fmt::format(" {}", kGrainNames[static_cast<std::size_t>(format.scales)]);
  }
  for (const NamedNumber& number : numbers_of(format.encoding)) {
    text += fmt::format(" {} {}", number.name, format.*number.member);
  }
  if (format.heads != 1) text += fmt::format(" {} {}", kHeads.name, format.heads);
  return text;
}

std::string describe(const CacheFormat& format) {
  if (format.k == format.v) return describe(format.k);
  return fmt::format("k {}, v {}", describe(format.k), describe(format.v));
}

RowFormat parse_row_format(std::string_view text) {
  const std::vector<std::string_view> words = words_of(text);
  const auto* const entry = words.empty() ? std::ranges::end(kEncodings)
                                          : std::ranges::find(kEncodings, words.front(), &RowEncodingEntry::name);
  if (entry == std::ranges::end(kEncodings)) refuse_text(text, "its first word is not a known encoding");
  RowFormat format;
  format.encoding = entry->encoding;
  std::size_t at = 1;
  if (format.encoding == RowEncoding::kFp8) {
    const auto grain = at < words.size() ? std::ranges::find(kGrainNames, words[at]) : kGrainNames.end();
    if (grain == kGrainNames.end()) refuse_text(text, "fp8 names what shares a scale: tensor, head or token_head");
    format.scales = static_cast<ScaleGrain>(grain - kGrainNames.begin());
    ++at;
  }
  std::vector<NamedNumber> numbers = numbers_of(format.encoding);
  if (format.encoding == RowEncoding::kLowRank && words.size() > at + 2 * numbers.size()) numbers.push_back(kHeads);
  for (const NamedNumber& number : numbers) {
    const bool there = at + 1 < words.size() && words[at] == number.name;
    const std::string_view digits = there ? words[at + 1] : std::string_view();
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), format.*number.member);
    if (!there || parsed.ec != std::errc() || parsed.ptr != digits.data() + digits.size()) {
      refuse_text(text, fmt::format("\"{} N\" is missing after \"{}\"", number.name, shortened(words[at - 1], 80)));
    }
    at += 2;
  }
  if (at != words.size()) refuse_text(text, fmt::format("\"{}\" has no meaning here", shortened(words[at], 80)));
  return format;
}

void check_format(std::string_view tensor, const RowFormat& format, const RowShape& shape) {
  if (format.is_plain()) return;
  Missing missing = entry_of(format.encoding).missing(format, shape);
  require(missing, shape.dtype != Dtype::kF32, "dtype fp32 (supported: bf16 and fp16)");
  if (missing.empty()) return;
  fail(ErrorCode::kUsage,
       fmt::format("{} of {} heads of {} can't be stored as {}", tensor, shape.heads, shape.dim, describe(format)),
       fmt::format("{}", fmt::join(missing, "; ")), "Choose another format, or another rank, group or dtype.");
}

}  // namespace ringattn
