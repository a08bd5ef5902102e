// SPDX-License-Identifier: Apache-2.0
#include "launch/verify_scan.hpp"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "attention/check/difference.hpp"
#include "attention/check/scan_output.hpp"
#include "attention/job/one_input.hpp"
#include "attention/job/scan_shapes.hpp"
#include "base/size.hpp"
#include "launch/outputs.hpp"
#include "launch/progress.hpp"
#include "launch/scan_request.hpp"
#include "launch/table.hpp"
#include "launch/verify_golden.hpp"
#include "launch/verify_shapes.hpp"

namespace ringattn {

namespace {

// What travels once for each hop.
std::string carried_word(const ScanInput& input) { return input.job().alone ? "halos" : "states"; }

bool verify_worlds(const Config& config, const ScanInput& input, const ScanOptions& library, const Screen& screen,
                   Transport& world, Report& report) {
  const Meeting meeting(world, Patience(config.options.timeout));
  double seconds = 0.0;  // on one rank
  {
    // Throws on every rank what the shapes would throw: no kernel, unlike ranks, too little memory.
    PreparedScan prepared(input, world, library);
    gather_scan(report, prepared, world, meeting);
    print_scan(screen, prepared, report);
    seconds = prepared.scan().predicted_seconds() * world.size();
  }
  const std::vector<ScanShape> shapes = scan_shapes(world_sizes(config, world), input);
  screen.context(fmt::format("{} shapes, bit for bit", shapes.size()));
  if (!shapes.back().resumed) {
    screen.context(fmt::format("no sequence is longer than a super-segment of {} tokens, so none is cut and resumed",
                               kSuperSegmentTokens));
  }
  if (config.options.dry_run) {
    screen.context("dry run: nothing is computed");
    return true;
  }
  ProgressDisplay progress(config.options, world.rank() == 0);
  std::optional<Difference> first;
  std::int64_t done = 0;
  Table table({{"ranks"}, {"runs"}, {"sequences"}, {carried_word(input), "moved"}, {"verdict"}});
  run_scan_shapes(input, library, shapes, world, seconds, [&](const ScanShape& shape, const ScanShapeResult& result) {
    table.add({fmt::format("{}", shape.ranks), shape.in_turn ? "in-turn" : "neighbours",
               shape.resumed ? "resumed" : "whole", fmt::format("{}", result.states),
               done == 0 ? "baseline" : (result.difference ? "FAIL" : "PASS")});
    if (!first) first = result.difference;
    progress.update("shape", {++done, static_cast<std::int64_t>(shapes.size())});
  });
  progress.clear();
  screen.print(table.text());
  if (first) screen.print(fmt::format("  first difference: {}\n", describe(*first, input.job())));
  return !first;
}

bool check_against_oracle(const Meeting& meeting, const ScanInput& input, const ScanRankResult& result,
                          const JobOptions& options, const Scan& scan, const Screen& screen, Report& report) {
  const ScanAccuracy all = check_scan_result(meeting, input, options.rows, result.checked_view(input.job()),
                                             rounds_factors(*scan.kernel().row), scan.options().threads);
  report.scan_accuracy = all;
  const auto place = [](const RowSample& sample) {
    return fmt::format("token {}, head {}", sample.token, sample.head);
  };
  screen.context(fmt::format("{} against the fp64 oracle", counted(static_cast<std::uint64_t>(all.rows), "row")));
  if (all.compared == 0) {
    screen.print("  y: no value is finite here and in fp64\n");
  } else {
    screen.print(fmt::format("  y: greatest error {:.3g} of what is allowed, {:.3g} of {:.3g} at {}\n", all.part,
                             all.error, all.allowed, place(all.worst)));
  }
  if (all.misplaced > 0) {
    screen.print(fmt::format("  {} values are NaN or infinite where fp64 has others, the first at {}\n", all.misplaced,
                             place(all.first_misplaced)));
  }
  const StateAccuracy& states = all.states;
  if (states.compared > 0) {
    screen.print(fmt::format(
        "  final states: greatest error {:.3g} of what is allowed, {:.3g} of {:.3g} at sequence {}, head {}\n",
        states.part, states.error, states.allowed, states.sequence, states.head));
  }
  if (states.misplaced > 0) {
    screen.print(fmt::format("  NaN or infinite in final states where fp64 has others: {}\n",
                             counted(static_cast<std::uint64_t>(states.misplaced), "element")));
  }
  return all.passes();
}

bool check_against_file(const Meeting& meeting, const ScanInput& input, const ScanRankResult& result,
                        const ScanOutputFile& against, const std::string& path, const Screen& screen) {
  const ScanJob& job = input.job();
  std::optional<Difference> mine;
  meeting.together([&] {
    mine = against.compare(result.runs, result.y_view(job.spec), result.sequences, result.carried_view(job));
  });
  const auto difference = earliest(meeting, mine);
  screen.context(fmt::format("against {}, bit for bit{}", path,
                             against.has_carried() ? "" : fmt::format("; it holds no {}", carried_name(job))));
  if (difference) screen.print(fmt::format("  first difference: {}\n", describe(*difference, job)));
  return !difference;
}

// Checks that need a single run.
bool verify_single(const Config& config, const ScanInput& input, const ScanOptions& library,
                   const std::optional<ScanOutputFile>& against, const Screen& screen, Transport& world,
                   Report& report) {
  const JobOptions& options = config.options;
  const Meeting meeting(world, Patience(options.timeout));
  PreparedScan prepared(input, world, library);
  gather_scan(report, prepared, world, meeting);
  print_scan(screen, prepared, report);
  Golden golden = golden_of(input, prepared.scan().kernel().row->name, prepared.scan().backend().identity());
  Golden recorded;
  if (!options.golden.empty()) recorded = read_golden(meeting, options.golden, golden);
  if (options.dry_run) {
    screen.context("dry run: nothing is computed");
    return true;
  }
  ProgressDisplay progress(options, world.rank() == 0);
  const ScanFileResult result =
      prepared.run([&](std::string_view what, const StepCount& steps) { progress.update(what, steps); });
  progress.clear();
  report.scan_digests = result.digests;
  gather_scan_figures(report, prepared, result.rank, world, meeting);
  screen.context(
      fmt::format("digests: y {}, {} {}", result.digests.y, carried_name(input.job()), result.digests.final_states));
  golden.digest_out = result.digests.y;
  golden.digest_final_states = result.digests.final_states;
  if (!options.record.empty()) {
    write_golden(screen, meeting, options, golden);
    return true;
  }
  if (!options.golden.empty()) return check_golden(screen, options.golden, recorded, golden);
  if (against) return check_against_file(meeting, input, result.rank, *against, options.against, screen);
  return check_against_oracle(meeting, input, result.rank, options, prepared.scan(), screen, report);
}

}  // namespace

bool verify_scan(const Invocation& invocation, const Screen& screen, Transport& world, Report& report) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const Meeting meeting(world, Patience(options.timeout));
  const ScanOptions library = scan_options(config);
  std::optional<ScanInput> input;
  std::optional<ScanOutputFile> against;
  meeting.together([&] {
    input.emplace(open_scan(config).with_final_states());
    if (!options.against.empty() && options.against != "oracle") against.emplace(options.against, *input);
    if (world.rank() == 0) check_outputs(invocation);
  });
  agree_on_files(meeting, [&] { return input->fingerprints(); });
  if (against) agree_on_files(meeting, [&] { return against->fingerprints(); });
  const bool worlds = options.against.empty() && options.record.empty() && options.golden.empty();
  return worlds ? verify_worlds(config, *input, library, screen, world, report)
                : verify_single(config, *input, library, against, screen, world, report);
}

}  // namespace ringattn
