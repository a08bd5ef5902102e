// SPDX-License-Identifier: Apache-2.0
// Environment variables of the runtime that do not stand for a flag. One table documents them, and their values are
// read once.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ringattn {

struct Environment {
  double pace = 0.0;    // RINGATTN_PACE
  bool ranges = false;  // RINGATTN_RANGES
};

// One row per variable, including variables that only launchers, Python or the tests read. A name without a row is
// refused.
struct EnvironmentVariable {
  std::string_view name;
  std::string_view accepts;
  std::string_view meaning;  // one line for the documentation
  // Stores the value if Environment has a field for it. Returns false if the variable does not accept the value.
  bool (*set)(Environment& environment, std::string_view value);
  bool secret = false;  // the value appears in no message and no report
};

std::span<const EnvironmentVariable> environment_table();

// Returns true if `text` may serve as RINGATTN_STORE_SECRET: long enough, and without blanks.
bool is_secret(std::string_view text);

// The values of this process, read at the first call. Throws kUsage for a value that its variable doesn't accept.
const Environment& environment();

// The value as messages and reports show it. A secret's value is left out.
std::string shown_value(std::string_view name, std::string_view value);

// NAME=value pairs of this process whose names start with one of `prefixes`, sorted by name, with shown_value()
// applied.
struct EnvironmentEntry {
  std::string name;
  std::string value;
};
std::vector<EnvironmentEntry> environment_entries(std::span<const std::string_view> prefixes);

// A variable's value; nothing if it isn't set.
std::optional<std::string> environment_value(std::string_view name);

}  // namespace ringattn
