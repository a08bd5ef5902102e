// SPDX-License-Identifier: Apache-2.0
// TOML and JSON files of a few named values, as a flat list. Keys of nested tables are joined by dots. Configurations,
// machine models and golden files are read this way, without including the parsers' headers.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace ringattn {

enum class FlatKind { kText, kInteger, kReal, kTruth };

struct FlatEntry {
  std::string key;   // e.g. "digest.out"
  std::string text;  // the value: text unchanged, numbers in the shortest exact decimal form, "true", "false"
  FlatKind kind = FlatKind::kText;
  int line = 0;  // 0: not known
};

// Entries in the file's order. `name` stands for the file in messages. Throws `code` for syntax errors (with their
// line), arrays, dates, nulls, duplicate keys, and more than 8 levels. Messages end with `suggestion`.
std::vector<FlatEntry> parse_toml_table(
    std::string_view text, std::string_view name, ErrorCode code,
    const MessageTemplate& suggestion = "Write lines such as key = \"text\" or key = 8.");
std::vector<FlatEntry> parse_json_table(
    std::string_view text, std::string_view name, ErrorCode code,
    const MessageTemplate& suggestion = "Write one object, such as {\"key\": \"text\", \"other\": 8}.");

// `text` as a TOML string, quotes included.
std::string toml_quoted(std::string_view text);

}  // namespace ringattn
