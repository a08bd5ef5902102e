// SPDX-License-Identifier: Apache-2.0
// Result tables. As text they have two header lines, names and units, that start with '#', so `grep -v '^#'` leaves the
// data. As Markdown and CSV they have one: "median (ms)".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ringattn {

class Table {
 public:
  static constexpr std::string_view kNoValue = "-";  // a cell without a value; empty in CSV

  struct Column {
    std::string name;
    std::string unit = {};  // e.g. "(ms)"
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // Columns as wide as their widest cell, right-aligned.
  std::string text(bool with_header = true) const;
  std::string markdown() const;
  // RFC 4180: lines end with CRLF, cells with commas, quotes or line breaks are quoted.
  std::string csv() const;

 private:
  // The header and the rows, as cells.
  std::vector<std::vector<std::string>> lines() const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ringattn
