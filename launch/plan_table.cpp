// SPDX-License-Identifier: Apache-2.0
#include "launch/plan_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "launch/message_text.hpp"
#include "launch/report.hpp"

namespace ringattn {

KernelScope planned_scope(const JobOptions& options) {
  const bool forced = options.backend != "auto" || options.kernel != "auto";
  return forced ? KernelScope::kAnyMachine : KernelScope::kThisMachine;
}

void note_default_machine(const Screen& screen, const JobOptions& options) {
  if (!options.machine.empty()) return;
  screen.context(
      "note: estimated for a default machine description, not for a measured machine; "
      "`ringattn info --measure --machine FILE` measures this one");
}

PlanTable::PlanTable(const Invocation& invocation, const Screen& screen, const InputShape& shape, std::string_view op,
                     std::string_view kernel, std::vector<Table::Column> columns, std::size_t rows,
                     std::string_view unit)
    : invocation_(invocation), screen_(screen), summary_(std::move(columns)), rows_(rows), unit_(unit) {
  json_.begin_object();
  write_document_head(json_, "plan", invocation, shape);
  json_.member("op", op).member("kernel", kernel).key("rows").begin_array();
}

void PlanTable::add(std::int64_t world, std::int64_t units,
                    const std::function<std::vector<std::string>(JsonWriter& json)>& row) {
  try {
    summary_.add(row(json_));
    some_fit_ = true;
  } catch (const Error& error) {
    // One of several rows may not fit into memory: the table reports it.
    if (error.code() != ErrorCode::kMemory || alone()) throw;
    if (!misfit_) misfit_ = error;
    screen_.context(fmt::format("world {}, {} {}: {}", world, units, unit_, program_text(error)));
    json_.begin_object().member("world", world).member(unit_, units);
    json_.member("does_not_fit", program_text(error)).end_object();
  }
}

void PlanTable::finish() {
  if (!some_fit_ && misfit_) throw Error(*misfit_);
  screen_.print(summary_.text(!invocation_.config.options.quiet));
  json_.end_array().key("error").null().end_object();
  invocation_.report_file->write(json_.text());
}

}  // namespace ringattn
