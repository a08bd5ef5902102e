// SPDX-License-Identifier: Apache-2.0
// Parses the texts of flags, environment variables and config keys. All three layers use these functions.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ringattn {

// Thrown by all functions here. The layer that knows the text's origin converts it to an Error.
struct BadValue {
  std::string accepted;         // e.g. "a number of tokens such as 4096, 8k or 2m"
  std::string suggestion = {};  // a sentence; empty if the accepted values say enough
};

inline constexpr std::int64_t kMaxTokens = std::int64_t{1} << 60;

// Tokens or bytes (`unit`), with suffixes k, m, g = 1024¹…³, within [min_value, max_value].
std::int64_t parse_size_value(std::string_view text, std::string_view unit, std::int64_t min_value,
                              std::int64_t max_value);

// "8k,64k", "8k-2m*2" (8k, 16k, … up to 2m), or both mixed; at most 1,000 values, each within [min_value, max_value].
std::vector<std::int64_t> parse_size_list(std::string_view text, std::string_view unit, std::int64_t min_value,
                                          std::int64_t max_value);

// A decimal integer within [min_value, max_value].
std::int64_t parse_integer(std::string_view text, std::int64_t min_value, std::int64_t max_value);
std::uint64_t parse_seed(std::string_view text);

// A finite decimal number within [min_value, max_value].
double parse_real(std::string_view text, double min_value = std::numeric_limits<double>::lowest(),
                  double max_value = std::numeric_limits<double>::max());

// Index of `text` among `choices`; the error lists them and suggests the nearest.
std::size_t parse_choice(std::string_view text, std::span<const std::string_view> choices);

// on, off, true, false, 1, 0.
bool parse_switch(std::string_view text);

// Throws for an empty text.
std::string parse_text(std::string_view text, std::string_view what);

// "a, b or c".
std::string join_choices(std::span<const std::string_view> choices);

}  // namespace ringattn
