// SPDX-License-Identifier: Apache-2.0
// The environment variables of the runtime that are no twin of a flag: documented in one table, read once.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ringattn {

struct Environment {
  double pace = 0.0;  // RINGATTN_PACE
};

// A variable = one row, also where others read it (launchers, Python, tests): a name that no row has is refused.
struct EnvironmentVariable {
  std::string_view name;
  std::string_view accepts;
  std::string_view meaning;  // one line for people
  // Takes over the value where Environment has it; false: it is not what the variable accepts.
  bool (*set)(Environment& environment, std::string_view value);
  bool secret = false;  // the value appears in no message and no report
};

std::span<const EnvironmentVariable> environment_table();

// Whether a text may be a secret (RINGATTN_STORE_SECRET): long enough, and one word.
bool is_secret(std::string_view text);

// The values of this process, read at the first call. Throws kUsage for a value that its variable doesn't accept.
const Environment& environment();

// The value as messages and reports show it: that of a secret is left out.
std::string shown_value(std::string_view name, std::string_view value);

// NAME=value pairs of this process whose names start with one of `prefixes`, sorted by name, with their shown values.
struct EnvironmentEntry {
  std::string name;
  std::string value;
};
std::vector<EnvironmentEntry> environment_entries(std::span<const std::string_view> prefixes);

// A variable's value; nothing if it isn't set.
std::optional<std::string> environment_value(std::string_view name);

}  // namespace ringattn
