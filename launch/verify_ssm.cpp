// SPDX-License-Identifier: Apache-2.0
#include "launch/verify_ssm.hpp"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "base/size.hpp"
#include "launch/outputs.hpp"
#include "launch/progress.hpp"
#include "launch/ssm_request.hpp"
#include "launch/table.hpp"
#include "launch/verify_golden.hpp"
#include "launch/verify_shapes.hpp"
#include "ops/common/difference.hpp"
#include "ops/common/input_agreement.hpp"
#include "ops/ssm/ssm_output.hpp"
#include "ops/ssm/ssm_shapes.hpp"

namespace ringattn {

namespace {

// Bytes that are sent once per hop.
std::string carried_word(const SsmInput& input) { return input.job().conv1d_only ? "halos" : "states"; }

bool verify_worlds(const Config& config, const SsmInput& input, const SsmOptions& library, const Screen& screen,
                   Transport& world, Report& report) {
  const Collective collective(world, Timeouts(config.options.timeout));
  double seconds = 0.0;  // on one rank
  {
    // Throws on every rank what the shapes would throw: no kernel, unlike ranks, too little memory.
    PreparedSsm prepared(input, world, library);
    gather_ssm(report, prepared, world, collective);
    print_ssm(screen, prepared, report);
    seconds = prepared.ssm().estimated_seconds() * world.size();
  }
  const std::vector<SsmShape> shapes = ssm_shapes(world_sizes(config, world), input);
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
  run_ssm_shapes(input, library, shapes, world, seconds, [&](const SsmShape& shape, const SsmShapeResult& result) {
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

bool check_against_oracle(const Collective& collective, const SsmInput& input, const SsmRankResult& result,
                          const JobOptions& options, const Ssm& scan, const Screen& screen, Report& report) {
  const SsmAccuracy all = check_ssm_result(collective, input, options.rows, result.result_view(input.job()),
                                           rounds_factors(*scan.kernel().row), scan.options().threads);
  report.ssm_accuracy = all;
  const auto location = [](const RowSample& sample) {
    return fmt::format("token {}, head {}", sample.token, sample.head);
  };
  screen.context(fmt::format("{} against the fp64 oracle", counted(static_cast<std::uint64_t>(all.rows), "row")));
  if (all.compared == 0) {
    screen.print("  y: no value is finite both here and in fp64\n");
  } else {
    screen.print(fmt::format("  y: greatest error {:.3g} of what is allowed, {:.3g} of {:.3g} at {}\n", all.part,
                             all.error, all.allowed, location(all.worst)));
  }
  if (all.misplaced > 0) {
    screen.print(fmt::format("  {} values are NaN or infinite where fp64 has another value, the first at {}\n",
                             all.misplaced, location(all.first_misplaced)));
  }
  const StateAccuracy& states = all.states;
  if (states.compared > 0) {
    screen.print(fmt::format(
        "  final states: greatest error {:.3g} of what is allowed, {:.3g} of {:.3g} at sequence {}, head {}\n",
        states.part, states.error, states.allowed, states.sequence, states.head));
  }
  if (states.misplaced > 0) {
    screen.print(fmt::format("  NaN or infinite in final states where fp64 has another value: {}\n",
                             counted(static_cast<std::uint64_t>(states.misplaced), "element")));
  }
  return all.passes();
}

bool check_against_file(const Collective& collective, const SsmInput& input, const SsmRankResult& result,
                        const SsmOutputFile& against, const std::string& path, const Screen& screen) {
  const SsmJob& job = input.job();
  std::optional<Difference> mine;
  collective.run_collectively([&] {
    mine = against.compare(result.runs, result.y_view(job.spec), result.sequences, result.carried_view(job));
  });
  const auto difference = earliest(collective, mine);
  screen.context(fmt::format("against {}, bit for bit{}", path,
                             against.has_carried() ? "" : fmt::format("; it holds no {}", carried_name(job))));
  if (difference) screen.print(fmt::format("  first difference: {}\n", describe(*difference, job)));
  return !difference;
}

// Checks that need a single run.
bool verify_single(const Config& config, const SsmInput& input, const SsmOptions& library,
                   const std::optional<SsmOutputFile>& against, const Screen& screen, Transport& world,
                   Report& report) {
  const JobOptions& options = config.options;
  const Collective collective(world, Timeouts(options.timeout));
  PreparedSsm prepared(input, world, library);
  gather_ssm(report, prepared, world, collective);
  print_ssm(screen, prepared, report);
  Golden golden = golden_of(input, prepared.ssm().kernel().row->name, prepared.ssm().backend().identity());
  Golden recorded;
  if (!options.golden.empty()) recorded = read_golden(collective, options.golden, golden);
  if (options.dry_run) {
    screen.context("dry run: nothing is computed");
    return true;
  }
  ProgressDisplay progress(options, world.rank() == 0);
  const SsmFileResult result =
      prepared.run([&](std::string_view what, const StepCount& steps) { progress.update(what, steps); });
  progress.clear();
  report.ssm_digests = result.digests;
  gather_ssm_figures(report, prepared, result.rank, world, collective);
  screen.context(
      fmt::format("digests: y {}, {} {}", result.digests.y, carried_name(input.job()), result.digests.final_states));
  golden.digest_out = result.digests.y;
  golden.digest_final_states = result.digests.final_states;
  if (!options.record.empty()) {
    write_golden(screen, collective, options, golden);
    return true;
  }
  if (!options.golden.empty()) return check_golden(screen, options.golden, recorded, golden);
  if (against) return check_against_file(collective, input, result.rank, *against, options.against, screen);
  return check_against_oracle(collective, input, result.rank, options, prepared.ssm(), screen, report);
}

}  // namespace

bool verify_ssm(const Invocation& invocation, const Screen& screen, Transport& world, Report& report) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const Collective collective(world, Timeouts(options.timeout));
  const SsmOptions library = ssm_options(config);
  std::optional<SsmInput> input;
  std::optional<SsmOutputFile> against;
  collective.run_collectively([&] {
    input.emplace(open_ssm(config).with_final_states());
    if (!options.against.empty() && options.against != "oracle") against.emplace(options.against, *input);
    if (world.rank() == 0) check_outputs(invocation);
  });
  agree_on_files(collective, [&] { return input->fingerprints(); });
  if (against) agree_on_files(collective, [&] { return against->fingerprints(); });
  const bool worlds = options.against.empty() && options.record.empty() && options.golden.empty();
  return worlds ? verify_worlds(config, *input, library, screen, world, report)
                : verify_single(config, *input, library, against, screen, world, report);
}

}  // namespace ringattn
