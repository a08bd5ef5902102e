// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/compression_methods.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/error.hpp"

namespace ringattn {

namespace {

using Formats = std::vector<CacheFormat>;

constexpr std::int64_t kMaxNumbers = 1 << 16;  // maximum of heads, dims and ranks

RowFormat fp8(ScaleGrain scales) { return {RowEncoding::kFp8, scales}; }
RowFormat int4(RowEncoding encoding, int group) { return {encoding, ScaleGrain::kTokenHead, group}; }

Formats same(std::initializer_list<RowFormat> formats) {
  Formats all;
  for (const RowFormat& format : formats) all.push_back({format, format});
  return all;
}

// Formats of every rank that both tensors support. The default, a quarter of the smaller dim, comes first.
template <class OfRank>
Formats of_ranks(const RowShape& k, const RowShape& v, const OfRank& of_rank) {
  Formats all;
  const int usual = std::max(8, static_cast<int>(std::min(k.dim, v.dim) / 4) / 8 * 8);
  all.push_back({of_rank(usual), of_rank(usual)});
  const auto max_rank = static_cast<int>(std::min({k.dim, v.dim, kMaxNumbers}));
  for (int rank = 8; rank < max_rank; rank += 8) all.push_back({of_rank(rank), of_rank(rank)});
  return all;
}

constexpr std::string_view kLowRank = "lowrank";

constexpr CompressionMethod kMethods[] = {
    {"fp8", "e4m3, a scale per token and head or, to remove more, per head",
     [](const RowShape&, const RowShape&) {
       return same({fp8(ScaleGrain::kTokenHead), fp8(ScaleGrain::kHead)});
     }},
    {"int8", "8-bit integers, a scale per token and head",
     [](const RowShape&, const RowShape&) { return same({{RowEncoding::kInt8}}); }},
    {"int4", "4-bit integers as in KIVI: keys per channel of 32 or 64 tokens, values per 32 channels of a token",
     [](const RowShape&, const RowShape&) {
       const RowFormat values = int4(RowEncoding::kInt4Token, 32);
       return Formats{{int4(RowEncoding::kInt4Channel, 32), values}, {int4(RowEncoding::kInt4Channel, 64), values}};
     }},
    {kLowRank, "low rank by singular value decomposition of a head's rows, the rank from the ratio",
     [](const RowShape& k, const RowShape& v) {
       return of_ranks(k, v, [](int rank) {
         return RowFormat{RowEncoding::kLowRank, ScaleGrain::kTokenHead, 0, rank};
       });
     }},
    {"vq", "vector quantization: 8-bit indices for 2, 4 or 8 channels, codebooks by k-means",
     [](const RowShape&, const RowShape&) {
       const auto of_width = [](int width) {
         return RowFormat{RowEncoding::kVector, ScaleGrain::kTokenHead, 0, 0, width};
       };
       return same({of_width(4), of_width(2), of_width(8)});
     }},
    {"hybrid", "low rank, a 4-bit remainder, and 4 outlier channels not quantized, the rank from the ratio",
     [](const RowShape& k, const RowShape& v) {
       Formats all = of_ranks(
           k, v, [](int rank) { return RowFormat{RowEncoding::kHybrid, ScaleGrain::kTokenHead, 32, rank, 0, 4}; });
       all[0].k.rank = all[0].v.rank = std::min(k.dim, v.dim) > 16 ? 16 : 8;
       return all;
     }},
};

// Example of a format's text in messages.
constexpr std::string_view kWords = "fp8 tensor";

std::vector<std::string_view> method_names() {
  std::vector<std::string_view> names;
  for (const CompressionMethod& method : kMethods) names.push_back(method.name);
  return names;
}

// The suggestion for a name that is not among `names`.
std::string choose_one(std::string_view name, const std::vector<std::string_view>& names) {
  const std::string nearest = nearest_name(name, names.data(), names.size());
  return nearest.empty() ? std::string("Choose one of them.") : fmt::format("Did you mean {}?", nearest);
}

// Parses the option after a method's colon: the heads that share a basis. Throws kUsage for anything else.
int shared_heads(const CompressionMethod& method, std::string_view option) {
  constexpr std::string_view kOption = "heads=";
  int heads = 0;
  const std::string_view digits = option.substr(std::min(kOption.size(), option.size()));
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), heads);
  const bool whole = parsed.ec == std::errc() && parsed.ptr == digits.data() + digits.size();
  if (method.name == kLowRank && option.starts_with(kOption) && whole && heads >= 1) return heads;
  fail(ErrorCode::kUsage, fmt::format("\"{}\" is not an option of {}", option, method.name),
       method.name == kLowRank ? "heads=N says how many KV heads share a basis"
                               : fmt::format("methods have none but {}, whose heads=N shares bases", kLowRank),
       fmt::format("Try {}:heads=2, or a full format string such as \"{}\".", kLowRank, kWords));
}

// A method, or a format's text; std::nullopt if it is neither. Throws kUsage for text that begins as a format but is
// not one.
std::optional<FormatChoice> find_choice(std::string_view text) {
  FormatChoice choice;
  choice.name = text;
  const std::size_t colon = std::min(text.find(':'), text.size());
  if (const auto* const method = std::ranges::find(kMethods, text.substr(0, colon), &CompressionMethod::name);
      method != std::ranges::end(kMethods)) {
    choice.method = method;
    if (colon < text.size()) choice.heads = shared_heads(*method, text.substr(colon + 1));
    return choice;
  }
  const std::size_t space = text.find(' ');
  if (space == std::string_view::npos) return std::nullopt;
  const auto encodings = row_encodings();
  const auto encoding = std::ranges::find(encodings, text.substr(0, space), &RowEncodingEntry::name);
  // Latent rows are not keys or values, and plain rows are not compressed.
  if (encoding == encodings.end() || encoding->encoding == RowEncoding::kLatent ||
      encoding->encoding == RowEncoding::kPlain) {
    return std::nullopt;
  }
  choice.format = parse_row_format(text);
  return choice;
}

void check_shape(const char* name, const RowShape& shape) {
  const auto possible = [](std::int64_t number) { return number >= 1 && number <= kMaxNumbers; };
  if (possible(shape.heads) && possible(shape.dim)) return;
  fail(ErrorCode::kUsage, fmt::format("{} of {} heads of {} is to be stored in a format", name, shape.heads, shape.dim),
       fmt::format("heads and dims are 1 to {}", kMaxNumbers), "Check the shape.");
}

bool holds(const CacheFormat& format, const RowShape& k, const RowShape& v) {
  return entry_of(format.k.encoding).missing(format.k, k).empty() &&
         entry_of(format.v.encoding).missing(format.v, v).empty();
}

}  // namespace

std::span<const CompressionMethod> compression_methods() { return kMethods; }

Formats FormatChoice::formats(const RowShape& k, const RowShape& v) const {
  if (method == nullptr) return {{format, format}};
  if (heads == 1) return method->formats(k, v);
  const RowFormat group{.encoding = RowEncoding::kLowRank, .rank = 8, .heads = heads};
  // Groups that do not divide the heads are rejected for any rank, because a group may have any number of heads.
  if (k.heads % heads != 0 || v.heads % heads != 0) return {{group, group}};
  // Ranks are limited by a group's dim, with the group as one head.
  Formats all = method->formats(low_rank_shape(group, k), low_rank_shape(group, v));
  for (CacheFormat& format_of_ranks : all) format_of_ranks.k.heads = format_of_ranks.v.heads = heads;
  return all;
}

FormatChoice parse_format_choice(std::string_view text) {
  if (const auto choice = find_choice(text)) return *choice;
  const std::vector<std::string_view> names = method_names();
  fail(ErrorCode::kUsage, fmt::format("there is no method of compression \"{}\"", text),
       fmt::format("methods are {}, or a full format string such as \"{}\"", fmt::join(names, ", "), kWords),
       choose_one(text, names));
}

CacheMethod parse_cache_method(std::string_view text) {
  CacheMethod method;
  const std::size_t plus = std::min(text.find('+'), text.size());
  std::string_view rest = text;
  if (const std::string_view first = text.substr(0, plus); find_eviction_method(first.substr(0, first.find(':')))) {
    method.eviction = parse_eviction(first);
    if (plus == text.size()) return method;
    rest = text.substr(plus + 1);
  }
  method.format = find_choice(rest);
  if (method.format) return method;
  std::vector<std::string_view> names = method_names();
  const std::string formats = fmt::format("{}", fmt::join(names, ", "));
  std::vector<std::string_view> evictions;
  for (const EvictionMethod& known : eviction_methods()) evictions.push_back(known.name);
  if (!method.eviction) names.insert(names.end(), evictions.begin(), evictions.end());
  fail(ErrorCode::kUsage,
       method.eviction ? fmt::format("there is no method of compression \"{}\" for the tokens that are left", rest)
                       : fmt::format("there is no method of compression \"{}\"", rest),
       fmt::format(
           "methods are {}, or a full format string such as \"{}\"; {} evict tokens, and may be followed by + and one "
           "of the others",
           formats, kWords, fmt::join(evictions, ", ")),
       choose_one(rest, names));
}

std::string describe(const Eviction& eviction) {
  const auto& [method, options] = eviction;
  std::string text = fmt::format("{}: first {}", method->name, options.first);
  if (options.last > 0) text += fmt::format(", last {}", options.last);
  if (method->needs_queries) text += fmt::format(", window {}", options.window);
  if (options.pool > 1) text += fmt::format(", pool {}", options.pool);
  return text + (options.shared ? ", all K/V heads together" : ", each K/V head");
}

double removed_share(const CacheFormat& format, const RowShape& k, const RowShape& v) {
  const double plain = static_cast<double>(token_bytes({}, k) + token_bytes({}, v));
  return plain > 0.0 ? 1.0 - static_cast<double>(token_bytes(format.k, k) + token_bytes(format.v, v)) / plain : 0.0;
}

bool meets_ratio(double removed, double ratio) { return removed >= ratio - 1e-9; }

std::string max_ratio(double removed) {
  // Rounds down. The tolerance keeps a product just below an integer at that integer; meets_ratio() has the same
  // tolerance.
  std::string text = fmt::format("{:.6f}", std::floor(removed * 1e6 + 1e-4) / 1e6);
  text.resize(text.find_last_not_of('0') + 1);
  return text.back() == '.' ? text + '0' : text;
}

CacheFormat choose_format(const FormatChoice& choice, std::optional<double> ratio, const RowShape& k,
                          const RowShape& v) {
  check_shape("k", k);
  check_shape("v", v);
  Formats formats = choice.formats(k, v);
  check_format("k", formats[0].k, k);
  check_format("v", formats[0].v, v);
  if (!ratio) return formats[0];
  if (!(*ratio >= 0.0)) {
    fail(ErrorCode::kUsage, {setting("ratio", fmt::format("{}", *ratio)), " with ", setting("method", choice.name)},
         "the ratio is the share of the bytes that is removed", "Use 0 to below 1, or leave it out.");
  }
  std::erase_if(formats, [&](const CacheFormat& format) { return !holds(format, k, v); });
  const CacheFormat* chosen = nullptr;
  double max_removed = -std::numeric_limits<double>::infinity();
  for (const CacheFormat& format : formats) {
    const double removed = removed_share(format, k, v);
    max_removed = std::max(max_removed, removed);
    const bool enough = meets_ratio(removed, *ratio);
    if (enough && (chosen == nullptr || removed < removed_share(*chosen, k, v))) chosen = &format;
  }
  if (chosen != nullptr) return *chosen;
  fail(
      ErrorCode::kUsage, {setting("ratio", fmt::format("{}", *ratio)), " with ", setting("method", choice.name)},
      fmt::format("the ratio is the share of the bytes that is removed, and {} removes {} of them at most", choice.name,
                  max_removed < 0.0 ? "none" : max_ratio(max_removed)),
      max_removed < 0.0 ? "Choose another method, or leave the ratio out." : "Ask for less, or choose another method.");
}

}  // namespace ringattn
