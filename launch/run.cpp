// SPDX-License-Identifier: Apache-2.0
// `ringattn run`: a job of any op.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "base/size.hpp"
#include "base/text_file.hpp"
#include "launch/commands.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/open_job.hpp"
#include "launch/outputs.hpp"
#include "launch/progress.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "launch/table.hpp"
#include "launch/trace.hpp"

namespace ringattn {

namespace {

void print_details(const Report& report, const Screen& screen) {
  for (std::size_t rank = 0; rank < report.figures.size(); ++rank) {
    const RankFigures& figures = report.figures[rank];
    const std::string waited = report.job->measures_exposed_comm()
                                   ? fmt::format(", {:.3f} ms exposed comm", figures.exposed_comm_seconds * 1e3)
                                   : std::string();
    screen.detail(fmt::format("rank {} on {}: {} tokens, {:.3f} ms{}, received {}, peak {}", rank, report.hosts[rank],
                              figures.tokens, figures.seconds * 1e3, waited,
                              format_bytes(static_cast<double>(figures.bytes_received)),
                              format_bytes(static_cast<double>(figures.memory_peak))));
  }
  const NonFinite total = report.non_finite();
  if (total.total() > 0) {
    screen.context(fmt::format("note: {} are NaN or infinite", report.job->non_finite_text(total)));
  }
}

void print_result(const Report& report, const Screen& screen, bool quiet) {
  const OpJob::Totals totals{report.slowest_seconds(),
                             report.max_exposed_comm_seconds(),
                             report.flops_per_second_per_rank(),
                             report.memory_peak(),
                             &*report.plan,
                             &report.digests};
  std::vector<Table::Column> columns;
  std::vector<std::string> cells;
  for (Cell& cell : report.job->columns(totals)) {
    columns.push_back({std::move(cell.title), std::move(cell.unit)});
    cells.push_back(std::move(cell.text));
  }
  Table table(std::move(columns));
  table.add(std::move(cells));
  screen.print(table.text(!quiet));
  for (const std::string& line : report.job->result_lines(report.digests)) screen.context(line);
}

int end_run(Report& report, const Collective& collective, const std::function<void()>& print) {
  report.verdict = "ok";
  collective.run_collectively([&] {
    if (collective.rank() != 0) return;
    print();
    write_report(report);
  });
  return 0;
}

int run_job(const Invocation& invocation, Transport& world, Report& report) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const bool first = world.rank() == 0;
  const Screen screen(options, first);
  const Collective collective(world, Timeouts(options.timeout));
  report.job = open_job(config, OpUse::kRun, world, collective);
  Options op_options;
  collective.run_collectively([&] {
    op_options = library_options(config);
    if (first) check_outputs(invocation);
  });
  OpJob& job = *report.job;
  prepare_job(report, op_options, world, collective);
  print_job(screen, report);
  if (options.dry_run) {
    return end_run(report, collective, [&] { screen.context("dry run: nothing is computed"); });
  }
  ProgressDisplay progress(options, first);
  const RankFigures mine =
      job.run([&](std::string_view what, const StepCount& steps) { progress.update(what, steps); });
  report.digests = job.digests(collective);
  progress.clear();
  gather_figures(report, mine, world, collective);
  if (!options.output.empty()) {
    job.write({options.output, options.force, deciding_values(config, op_entry(job.op()))});
  }
  std::vector<std::vector<TraceEvent>> timeline;
  if (!options.trace.empty()) timeline = gather_timeline(job.timeline(), collective);
  return end_run(report, collective, [&] {
    print_details(report, screen);
    print_result(report, screen, options.quiet);
    if (!options.output.empty()) screen.context(fmt::format("output: {}", options.output));
    if (!options.trace.empty()) {
      write_text_file(options.trace, trace_text(job.lanes(), timeline, report.hosts), options.force, "trace");
      screen.context(fmt::format("trace: {}", options.trace));
    }
  });
}

}  // namespace

int run_main(const Invocation& invocation, Transport* world) {
  return run_reported("run", invocation, *world, [&](Report& report) { return run_job(invocation, *world, report); });
}

}  // namespace ringattn
