// SPDX-License-Identifier: Apache-2.0
#include "launch/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace ringattn {

std::string Table::text(bool with_header) const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t width = std::max(columns_[c].name.size(), columns_[c].unit.size());
    for (const auto& row : rows_) width = std::max(width, row[c].size());
    widths.push_back(width);
  }
  std::string text;
  // Columns are separated by two spaces. A line starts with "# " or two spaces.
  const auto append_line = [&](std::string_view lead, auto cell) {
    text += lead;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      fmt::format_to(std::back_inserter(text), "{}{:>{}}", c == 0 ? "" : "  ", cell(c), widths[c]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
  };
  if (with_header) {
    append_line("# ", [&](std::size_t c) { return columns_[c].name; });
    if (std::any_of(columns_.begin(), columns_.end(), [](const Column& column) { return !column.unit.empty(); })) {
      append_line("# ", [&](std::size_t c) { return columns_[c].unit; });
    }
  }
  for (const auto& row : rows_) {
    append_line("  ", [&](std::size_t c) { return std::string_view(row[c]); });
  }
  return text;
}

std::vector<std::vector<std::string>> Table::lines() const {
  std::vector<std::vector<std::string>> lines(1);
  for (const Column& column : columns_) {
    lines[0].push_back(column.unit.empty() ? column.name : fmt::format("{} {}", column.name, column.unit));
  }
  lines.insert(lines.end(), rows_.begin(), rows_.end());
  return lines;
}

std::string Table::markdown() const {
  std::vector<std::vector<std::string>> all = lines();
  std::vector<std::size_t> widths(columns_.size(), 2);  // of "-:"
  for (auto& line : all) {
    for (std::size_t c = 0; c < line.size(); ++c) {
      std::string cell;
      for (const char letter : line[c]) cell += letter == '|' ? "\\|" : std::string(1, letter);
      line[c] = std::move(cell);
      widths[c] = std::max(widths[c], line[c].size());
    }
  }
  std::vector<std::string> rule;
  for (const std::size_t width : widths) rule.push_back(std::string(width - 1, '-') + ':');
  all.insert(all.begin() + 1, std::move(rule));
  std::string text;
  for (const auto& line : all) {
    text += '|';
    for (std::size_t c = 0; c < line.size(); ++c) {
      fmt::format_to(std::back_inserter(text), " {:>{}} |", line[c], widths[c]);
    }
    text += '\n';
  }
  return text;
}

std::string Table::csv() const {
  std::string text;
  for (const auto& line : lines()) {
    for (std::size_t c = 0; c < line.size(); ++c) {
      if (c > 0) text += ',';
      if (line[c] == kNoValue) continue;
      if (line[c].find_first_of(",\"\r\n") == std::string::npos) {
        text += line[c];
        continue;
      }
      text += '"';
      for (const char letter : line[c]) text += letter == '"' ? "\"\"" : std::string(1, letter);
      text += '"';
    }
    text += "\r\n";
  }
  return text;
}

}  // namespace ringattn
