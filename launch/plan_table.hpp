// SPDX-License-Identifier: Apache-2.0
// The table and the report of `ringattn plan` for any op: a row for each input and number of ranks, or the reason why
// they don't fit into memory.
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
#include "kernels/common/registry.hpp"
#include "launch/commands.hpp"
#include "launch/screen.hpp"
#include "launch/table.hpp"

namespace ringattn {

// The kernels that a plan may choose from. A backend or kernel that the user names may be one for another machine.
// Otherwise the kernel is chosen for this machine.
KernelScope planned_scope(const JobOptions& options);

// Prints a note if no --machine file is given: times are then estimated from a default description of a machine.
void note_default_machine(const Screen& screen, const JobOptions& options);

class PlanTable {
 public:
  // `shape` is the first input's, `rows` the number of rows to come, and `unit` what an input consists of: "tokens".
  PlanTable(const Invocation& invocation, const Screen& screen, const InputShape& shape, std::string_view op,
            std::string_view kernel, std::vector<Table::Column> columns, std::size_t rows, std::string_view unit);

  // Whether the table has only one row, so that its details are shown.
  bool alone() const { return rows_ == 1; }
  // Adds the row of an input of `units` units on `world` ranks. `row` returns its cells and writes its JSON object. If
  // `row` throws kMemory, prints the error and goes on. A table with only one row throws it.
  void add(std::int64_t world, std::int64_t units,
           const std::function<std::vector<std::string>(JsonWriter& json)>& row);
  // Prints the table and writes the report. If no row fits into memory, throws the first row's error.
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
