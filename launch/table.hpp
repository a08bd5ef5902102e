// SPDX-License-Identifier: Apache-2.0
// Result tables with two header lines, names and units, that start with '#', so `grep -v '^#'` leaves the data.
#pragma once

#include <string>
#include <vector>

namespace ringattn {

class Table {
 public:
  struct Column {
    std::string name;
    std::string unit = {};  // e.g. "(ms)"
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // Columns as wide as their widest cell, right-aligned.
  std::string text(bool with_header = true) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ringattn
