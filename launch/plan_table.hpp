// SPDX-License-Identifier: Apache-2.0
// What `ringattn plan` shows and reports of any op: a row for each input and world, or why a world is too small.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "kernels/registry.hpp"
#include "launch/commands.hpp"
#include "launch/file_shape.hpp"
#include "launch/screen.hpp"
#include "launch/table.hpp"

namespace ringattn {

// What is forced is meant for another machine, perhaps; what is not is this one's.
KernelScope planned_scope(const JobOptions& options);

// Says that times rest on a description of no machine in particular, where no file has one.
void note_default_machine(const Screen& screen, const JobOptions& options);

// Bytes in MiB, with two decimal digits.
std::string mebibytes(double bytes);
// What a rank owns, as sequence:first-last: the first four runs, or `all`.
std::string runs_text(std::span<const TokenRun> runs, bool all);

class PlanTable {
 public:
  // `shape`: of the first input; `rows`: how many there will be; `unit`: what an input is counted in, "tokens".
  PlanTable(const Invocation& invocation, const Screen& screen, const FileShape& shape, std::string_view op,
            std::string_view kernel, std::vector<Table::Column> columns, std::size_t rows, std::string_view unit);

  // Whether the one row is all that is asked for: then details of it are shown.
  bool alone() const { return rows_ == 1; }
  // Adds the row of an input of `units` units on `world` ranks: `row` gives its cells and writes its JSON object. Where
  // `row` throws kMemory, the table says that the world is too small; a table of one row throws the error instead.
  void add(std::int64_t world, std::int64_t units,
           const std::function<std::vector<std::string>(JsonWriter& json)>& row);
  // Prints the table and writes the report. Throws the first refusal where no world fits.
  void finish();

 private:
  const Invocation& invocation_;
  const Screen& screen_;
  Table summary_;
  std::size_t rows_;
  std::string_view unit_;
  JsonWriter json_;
  std::optional<Error> misfit_;
  bool some_fit_ = false;
};

}  // namespace ringattn
