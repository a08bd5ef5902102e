// SPDX-License-Identifier: Apache-2.0
// A look at a TOML text before it is parsed: toml++ makes a table for every segment of a dotted key and walks and frees
// them by recursion, so a key of 40,000 segments would end the process.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ringattn {

struct TomlLimits {
  static constexpr int kSegments = 8;  // of one dotted key, or of a table's name
  static constexpr int kNesting = 8;   // of brackets and braces
};

struct TomlRefusal {
  int line = 0;
  std::string why;
};

// The first place at which a text goes beyond the limits; nothing where it keeps them. What is no TOML may pass: a
// parser refuses it at the latest where this reader and the language part ways, so it never meets more depth than was
// counted here. Memory: none.
std::optional<TomlRefusal> find_toml_excess(std::string_view text);

}  // namespace ringattn
