// SPDX-License-Identifier: Apache-2.0
#include "launch/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace ringattn {

std::string Table::text(bool with_header) const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t width = std::max(columns_[c].name.size(), columns_[c].unit.size());
    for (const auto& row : rows_) width = std::max(width, row[c].size());
    widths.push_back(width);
  }
  std::string text;
  // Cells stand two columns apart; the first two columns of a line are "# " or blank.
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

}  // namespace ringattn
