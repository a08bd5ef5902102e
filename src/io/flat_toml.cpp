// SPDX-License-Identifier: Apache-2.0
// The only file that includes toml++.
#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>

#include "base/quotes.hpp"
#include "io/flat_table.hpp"
#include "io/toml_scan.hpp"

namespace ringattn {

namespace {

constexpr int kMaxDepth = 8;

void flatten(const toml::table& table, const std::string& prefix, int depth, std::string_view name, ErrorCode code,
             const MessageTemplate& suggestion, std::vector<FlatEntry>& entries) {
  for (const auto& [key, node] : table) {
    FlatEntry entry;
    entry.key = prefix + std::string(key.str());
    entry.line = static_cast<int>(node.source().begin.line);
    if (const toml::table* inner = node.as_table()) {
      if (depth == kMaxDepth) {
        fail(code, fmt::format("{}, line {}: {} is nested too deeply", name, entry.line, shortened(entry.key)),
             "at most 8 levels", suggestion);
      }
      flatten(*inner, entry.key + ".", depth + 1, name, code, suggestion, entries);
      continue;
    }
    if (const auto* text = node.as_string()) {
      entry.text = text->get();
    } else if (const auto* integer = node.as_integer()) {
      entry.kind = FlatKind::kInteger;
      entry.text = fmt::format("{}", integer->get());
    } else if (const auto* real = node.as_floating_point()) {
      entry.kind = FlatKind::kReal;
      entry.text = fmt::format("{}", real->get());
    } else if (const auto* truth = node.as_boolean()) {
      entry.kind = FlatKind::kTruth;
      entry.text = truth->get() ? "true" : "false";
    } else {
      fail(code, fmt::format("{}, line {}: {} is a list or a date", name, entry.line, shortened(entry.key)),
           "values are text, numbers, true or false", suggestion);
    }
    entries.push_back(std::move(entry));
  }
}

}  // namespace

std::vector<FlatEntry> parse_toml_table(std::string_view text, std::string_view name, ErrorCode code,
                                        const MessageTemplate& suggestion) {
  if (const auto excess = find_toml_excess(text)) {
    fail(code, fmt::format("{} is not a table of a few values", name),
         fmt::format("line {}: {}", excess->line, excess->why), suggestion);
  }
  std::vector<FlatEntry> entries;
  try {
    flatten(toml::parse(text, name), "", 1, name, code, suggestion, entries);
  } catch (const toml::parse_error& error) {
    fail(code, fmt::format("{} is not valid TOML", name),
         fmt::format("line {}: {}", error.source().begin.line, shortened(error.description())), suggestion);
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const FlatEntry& a, const FlatEntry& b) { return a.line < b.line; });
  return entries;
}

std::string toml_quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      quoted += fmt::format("\\u{:04X}", static_cast<unsigned>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

}  // namespace ringattn
