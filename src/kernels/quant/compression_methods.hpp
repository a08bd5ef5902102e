// SPDX-License-Identifier: Apache-2.0
// Parsing of the user's compression choice: a method, which has a list of formats with its default first, or one
// format; and the choice among a method's formats by the fraction of bytes to remove.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/quant/eviction.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn {

struct CompressionMethod {
  std::string_view name;   // "int4"
  std::string_view about;  // one line for people
  // Formats of a cache with such keys and values, the default first. Others remove more or less.
  std::vector<CacheFormat> (*formats)(const RowShape& k, const RowShape& v);
};

std::span<const CompressionMethod> compression_methods();

// A method, or one format for both tensors.
struct FormatChoice {
  std::string name;                           // the user's text: "int4", "fp8 tensor", "lowrank:heads=2"
  const CompressionMethod* method = nullptr;  // null: use `format`
  int heads = 1;                              // "lowrank": heads that share a basis
  RowFormat format;

  std::vector<CacheFormat> formats(const RowShape& k, const RowShape& v) const;
};
// Parses a method's name, for "lowrank" optionally with heads that share a basis ("lowrank:heads=2"), or the text of a
// format (parse_row_format()), which has at least two words. Throws kUsage for anything else.
FormatChoice parse_format_choice(std::string_view text);

// What is done to a KV cache: tokens are evicted, the remaining ones are stored in a format, or both.
struct CacheMethod {
  std::optional<Eviction> eviction;
  std::optional<FormatChoice> format;  // absent: rows are not compressed
};
// Parses a format choice, an eviction (parse_eviction()), or an eviction, "+" and a format choice. Throws kUsage for
// anything else.
CacheMethod parse_cache_method(std::string_view text);
// "snapkv: first 0, last 64, window 64, pool 5, each K/V head"
std::string describe(const Eviction& eviction);

// The fraction of the bytes of a token's keys and values that a format removes, not counting tables: 0.5 for half of
// them.
double removed_share(const CacheFormat& format, const RowShape& k, const RowShape& v);

// Whether `removed` is at least `ratio`, except for rounding. max_ratio() is the largest ratio that `removed` meets, as
// text that parses as a ratio: "0.430555" for 0.4305555…
bool meets_ratio(double removed, double ratio);
std::string max_ratio(double removed);

// Without a ratio, the method's default format. With one, the format that removes least among those that remove at
// least that fraction. Throws kUsage if there is none, saying how much the method can remove, and for shapes that no
// format of the method supports.
CacheFormat choose_format(const FormatChoice& choice, std::optional<double> ratio, const RowShape& k,
                          const RowShape& v);

}  // namespace ringattn
