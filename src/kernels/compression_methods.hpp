// SPDX-License-Identifier: Apache-2.0
// What a user names to say how keys and values are stored: a method of compression, which is a list of formats, the
// usual one first, or a format by its words; and the choice among formats by the share of bytes that is to be removed.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/eviction.hpp"
#include "kernels/row_format.hpp"

namespace ringattn {

struct CompressionMethod {
  std::string_view name;   // "int4"
  std::string_view about;  // one line for people
  // Formats of a cache with such keys and values, the usual one first; others remove more or less.
  std::vector<CacheFormat> (*formats)(const RowShape& k, const RowShape& v);
};

std::span<const CompressionMethod> compression_methods();

// A method, or one format of both tensors.
struct FormatChoice {
  std::string name;                           // as the user wrote it: "int4", "fp8 tensor", "lowrank:heads=2"
  const CompressionMethod* method = nullptr;  // null: `format`
  int heads = 1;                              // of "lowrank": that have a basis in common
  RowFormat format;

  std::vector<CacheFormat> formats(const RowShape& k, const RowShape& v) const;
};
// The name of a method, of "lowrank" also with heads that share a basis behind a colon ("lowrank:heads=2"), or a
// format's words (parse_row_format()), of which there are two at least. Throws kUsage for anything else.
FormatChoice parse_format_choice(std::string_view text);

// What is done to a cache: tokens are taken out, what is left is stored in a format, or one of the two.
struct CacheMethod {
  std::optional<Eviction> eviction;
  std::optional<FormatChoice> format;  // absent: rows stay as they are
};
// As a user writes it: a choice of formats, an eviction (parse_eviction()), or an eviction, "+" and a choice of
// formats. Throws kUsage for anything else.
CacheMethod parse_cache_method(std::string_view text);
// "snapkv: first 0, last 64, window 64, pool 5, each K/V head"
std::string describe(const Eviction& eviction);

// The share of a token's bytes that a format removes of its keys and values, tables aside: 0.5 for half of them.
double removed_share(const CacheFormat& format, const RowShape& k, const RowShape& v);

// Whether so much is removed where a ratio asks for it, but for what rounding leaves of a share; and the greatest ratio
// that asks for no more than `removed`, as text that is a ratio again: "0.430555" of 0.4305555…
bool meets_ratio(double removed, double ratio);
std::string max_ratio(double removed);

// Without a ratio the method's usual format; else of those that remove at least that share the one that removes least.
// Throws kUsage where none does, saying how much the method can remove, and for shapes that no format of it holds.
CacheFormat choose_format(const FormatChoice& choice, std::optional<double> ratio, const RowShape& k,
                          const RowShape& v);

}  // namespace ringattn
