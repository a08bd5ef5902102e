// SPDX-License-Identifier: Apache-2.0
// Checks a TOML text before it is parsed: toml++ makes a table for every segment of a dotted key, and walks and frees
// tables by recursion, so a key of 40,000 segments would crash the process.
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

// The first place at which a text exceeds the limits, or nothing. Invalid TOML may pass: the parser refuses it no later
// than where this scan and the language differ, so it never meets more depth than was counted here. Allocates no
// memory.
std::optional<TomlRefusal> find_toml_excess(std::string_view text);

}  // namespace ringattn
