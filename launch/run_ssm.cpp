// SPDX-License-Identifier: Apache-2.0
#include "launch/run_ssm.hpp"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "attention/tokens/cost.hpp"
#include "base/size.hpp"
#include "launch/outputs.hpp"
#include "launch/progress.hpp"
#include "launch/run_end.hpp"
#include "launch/ssm_request.hpp"
#include "launch/table.hpp"
#include "launch/trace.hpp"

namespace ringattn {

namespace {

void print_details(const Report& report, const Screen& screen) {
  for (std::size_t rank = 0; rank < report.figures.size(); ++rank) {
    const RankFigures& figures = report.figures[rank];
    const std::string waited =
        report.ssm->conv1d_only ? "" : fmt::format(", {:.3f} ms exposed comm", figures.exposed_comm_seconds * 1e3);
    screen.detail(fmt::format("rank {} on {}: {} tokens, {:.3f} ms{}, received {}, peak {}", rank, report.hosts[rank],
                              figures.tokens, figures.seconds * 1e3, waited,
                              format_bytes(static_cast<double>(figures.bytes_received)),
                              format_bytes(static_cast<double>(figures.memory_peak))));
  }
  const std::int64_t non_finite = report.non_finite().total();
  if (non_finite > 0) screen.context(fmt::format("note: {} values of the rows are NaN or infinite", non_finite));
}

void print_result(const Report& report, const Screen& screen, bool quiet) {
  const SsmJob& job = *report.ssm;
  const SsmSpec& spec = job.spec;
  const double seconds = report.slowest_seconds();
  const auto tokens = static_cast<double>(job.tokens());
  const auto rate = [&](double amount) { return seconds > 0.0 ? amount / seconds : 0.0; };
  std::vector<Table::Column> columns;
  std::vector<std::string> cells;
  const auto add = [&](Table::Column column, std::string cell) {
    columns.push_back(std::move(column));
    cells.push_back(std::move(cell));
  };
  add({"tokens"}, fmt::format("{}", job.tokens()));
  add({"seqs"}, fmt::format("{}", job.lengths.size()));
  add({spec.state_decays ? "channels" : "heads"}, fmt::format("{}", spec.heads));
  if (job.conv1d_only) {
    add({"width"}, fmt::format("{}", job.convolution->width));
  } else {
    add({"dim"}, fmt::format("{}", spec.head_dim));
    add({"state"}, fmt::format("{}", spec.state_dim));
    add({"groups"}, fmt::format("{}", spec.groups));
  }
  add({"dtype"}, std::string(dtype_name(spec.dtype)));
  add({"time", "(ms)"}, fmt::format("{:.3f}", seconds * 1e3));
  add({"Mtokens/s"}, fmt::format("{:.3f}", rate(tokens) * 1e-6));
  add({"GB/s", "all ranks"}, fmt::format("{:.2f}", rate(tokens * static_cast<double>(ssm_token_bytes(job))) * 1e-9));
  if (!job.conv1d_only) add({"exposed comm", "(ms)"}, fmt::format("{:.3f}", report.max_exposed_comm_seconds() * 1e3));
  add({"mem/rank", "(MiB)"}, fmt::format("{:.1f}", static_cast<double>(report.memory_peak()) / 0x1p20));
  add({"digest of y"}, report.ssm_digests->y);
  Table table(std::move(columns));
  table.add(std::move(cells));
  screen.print(table.text(!quiet));
}

}  // namespace

int run_ssm(const Invocation& invocation, Transport& world, Report& report) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const bool first = world.rank() == 0;
  const Screen screen(options, first);
  const Collective collective(world, Timeouts(options.timeout));

  SsmFileJob job;
  std::optional<SsmInput> input;  // open until the job has opened it, too
  collective.run_collectively([&] {
    input.emplace(open_ssm(config));
    job = ssm_file_job(config);
    if (first) check_outputs(invocation);
  });
  PreparedSsm prepared(std::move(job), world, ssm_options(config));
  input.reset();
  gather_ssm(report, prepared, world, collective);
  print_ssm(screen, prepared, report);
  if (options.dry_run) return end_dry_run(screen, report, collective);

  ProgressDisplay progress(options, first);
  const SsmFileResult result =
      prepared.run([&](std::string_view what, const StepCount& steps) { progress.update(what, steps); });
  progress.clear();
  report.ssm_digests = result.digests;
  gather_ssm_figures(report, prepared, result.rank, world, collective);
  prepared.write(result);
  std::vector<std::vector<SsmPhase>> timeline;
  if (!options.trace.empty()) timeline = gather_ssm_phases(result.rank.stats.parts, collective);
  const auto print = [&] {
    print_details(report, screen);
    print_result(report, screen, options.quiet);
    if (result.digests.final_states.empty()) return;
    screen.context(fmt::format("digest of {}: {}", carried_name(prepared.ssm().job()), result.digests.final_states));
  };
  return end_run(screen, report, collective, print, [&] { return trace_text(timeline, report.hosts); });
}

}  // namespace ringattn
