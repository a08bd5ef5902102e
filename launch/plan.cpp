// SPDX-License-Identifier: Apache-2.0
// `ringattn plan`: describes a run, computed only from the job's shape.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/json_writer.hpp"
#include "comm/world.hpp"
#include "launch/commands.hpp"
#include "launch/help.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/open_job.hpp"
#include "launch/plan_table.hpp"
#include "launch/screen.hpp"
#include "launch/table.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/values.hpp"

namespace ringattn {

namespace {

std::vector<Table::Column> columns_of(const std::vector<Cell>& cells) {
  std::vector<Table::Column> columns;
  for (const Cell& cell : cells) columns.push_back({cell.title, cell.unit});
  return columns;
}

void print_details(const Screen& screen, const JobOptions& options, std::int64_t world, const PlanRow& row) {
  for (const std::string& line : row.lines) screen.context(line);
  if (row.ranks_left_out > 0) {
    screen.context(fmt::format("… {} ranks in all; --verbose shows every one", world));
  }
  for (const std::string& note : row.notes) screen.context(note);
  if (row.block_columns.empty() || options.quiet) return;
  Table table(columns_of(row.block_columns));
  for (const std::vector<std::string>& cells : row.blocks) table.add(cells);
  screen.print(table.text());
}

// Throws the errors that a run with the same flags would throw.
void check_as_run(const Config& config, const Backend& backend) {
  const JobOptions& options = config.options;
  const std::int64_t most = *std::max_element(options.world.begin(), options.world.end());
  if (options.transport == "self" && most > 1) {
    fail(ErrorCode::kUsage, fmt::format("{} self contradicts --world {}", config.origin("transport"), most),
         "it is a world of one rank", "Leave it out.");
  }
  if (options.checksum) check_checksum(backend);
}

// How blocks will be sent: by the route of the named transport or, for auto, of the transport that connects processes.
Route planned_route(const Config& config, const KernelEntry& kernel) {
  const std::string_view backend = kernel.backend;
  const std::string_view memory = backend == "cpu" ? "host" : "device";
  const std::string& name = config.options.transport;
  const auto rows = transport_table();
  if (name == "auto" && backend == "cpu") return Route::kChain;  // mpi's, whether this build has it or not
  if (name == "auto") return Route::kDirect;                     // p2p's and nccl's
  std::vector<std::string_view> names{"auto"};
  for (const TransportRow& row : rows) {
    names.push_back(row.name);
    if (row.name != name) continue;
    if (row.memory == memory || row.memory == "any") return row.route;
    fail(ErrorCode::kUsage, fmt::format("{} {} contradicts kernel {}", config.origin("transport"), name, kernel.name),
         fmt::format("one moves {} memory, the other works in {} memory", row.memory, memory),
         "Choose both with --backend and --transport.");
  }
  const std::string nearest = nearest_name(name, names.data(), names.size());
  fail(ErrorCode::kUsage, fmt::format("{} is \"{}\"", config.origin("transport"), name),
       fmt::format("this build has {}", join_choices(names)),
       nearest.empty() ? "Leave it out, or see `ringattn info`." : fmt::format("Did you mean \"{}\"?", nearest));
}

}  // namespace

int plan_main(const Invocation& invocation, Transport*) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const Screen screen(options, true);
  invocation.report_file->check();
  const std::vector<std::unique_ptr<OpJob>> jobs = open_planned_jobs(config);
  const OpJob& first = *jobs.front();
  const PlanRequest request{library_options(config), planned_scope(options), screen.verbose()};
  std::vector<std::unique_ptr<OpPlan>> plans;
  plans.push_back(first.plan_worlds(request));
  const KernelEntry& kernel = plans.front()->kernel();
  check_as_run(config, plans.front()->backend());
  const Route route = planned_route(config, kernel);

  const std::string tool = version_line();
  screen.context(tool.substr(0, tool.size() - 1));
  screen.context(fmt::format("job: {}", jobs.size() == 1 ? first.describe() : first.describe_shape()));
  print_unread(screen, first.unread());
  note_model_sinks(screen, config);
  for (const std::string& line : plans.front()->lines()) screen.context(line);
  if (plans.front()->estimates_time()) note_default_machine(screen, options);

  PlanTable table(invocation, screen, first.shape(), first.op(), kernel.name, columns_of(plans.front()->columns()),
                  jobs.size() * options.world.size(), plans.front()->unit());
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (i > 0) plans.push_back(jobs[i]->plan_worlds(request));
    OpPlan& plan = *plans[i];
    if (const std::string text = plan.length_text(); !text.empty()) screen.context(text);
    for (const std::int64_t world : options.world) {
      table.add(world, plan.units(), [&](JsonWriter& json) {
        PlanRow row = plan.row(static_cast<int>(world), route, table.alone(), json);
        if (table.alone()) print_details(screen, options, world, row);
        return std::move(row.cells);
      });
    }
  }
  table.finish();
  return 0;
}

}  // namespace ringattn
