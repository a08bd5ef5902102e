// SPDX-License-Identifier: Apache-2.0
// `ringattn verify`: chooses the check, and has those that need one run of the job: against an output file, against the
// fp64 oracle, for another system's result, and against a golden file. verify_shapes.cpp compares runs in several
// shapes.
#include <fmt/format.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/size.hpp"
#include "base/text_file.hpp"
#include "launch/commands.hpp"
#include "launch/input_warnings.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/op_flags.hpp"
#include "launch/outputs.hpp"
#include "launch/progress.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "launch/ssm_request.hpp"
#include "launch/verify_decode.hpp"
#include "launch/verify_golden.hpp"
#include "launch/verify_shapes.hpp"
#include "launch/verify_ssm.hpp"
#include "ops/common/accuracy.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/difference.hpp"
#include "ops/common/file_job.hpp"
#include "ops/common/golden.hpp"
#include "ops/common/input_agreement.hpp"
#include "ops/common/kept_mass.hpp"
#include "ops/common/output.hpp"
#include "ops/common/output_file.hpp"
#include "ops/common/peer_file.hpp"
#include "ops/decode/decode_or_attend.hpp"

namespace ringattn {

namespace {

void check_flags(const Config& config) {
  const JobOptions& options = config.options;
  const int modes = (options.against.empty() ? 0 : 1) + (options.record.empty() ? 0 : 1) +
                    (options.golden.empty() ? 0 : 1) + (options.peer.empty() ? 0 : 1) + (options.decode ? 1 : 0);
  if (modes > 1) {
    fail(ErrorCode::kUsage, "--against, --record, --golden, --peer and --decode exclude each other",
         "one check at a time", "Leave out all but one of them.");
  }
  if (chosen(config, "rows") && options.against != "oracle" && options.peer.empty() && !options.decode) {
    fail(ErrorCode::kUsage, fmt::format("{} needs --against oracle, --peer or --decode", config.origin("rows")),
         "it sets how many rows these checks compare", "Add one of them, or leave it out.");
  }
}

// A user may take --against for a check against another system, so the error for a missing file suggests --peer.
OutputFile open_against(const Config& config, const JobInput& input) {
  const std::string& path = config.options.against;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    fail(ErrorCode::kFile, fmt::format("{} {} can't be opened", config.origin("against"), in_quotes(path)),
         "there is no such file; it takes an output file of `run`, or the word oracle",
         "To check another system, save its out and use --peer FILE.");
  }
  return {path, input};
}

// One run of the job, and what to check it against.
struct SingleRun {
  const Invocation& invocation;
  const JobInput& input;
  const Screen& screen;
  const OutputFile* against;  // null if the check needs none
  const PeerFile* peer;       // null if the check needs none
  PreparedFileJob& prepared;
  RankResult result;
  const Collective& collective;
  Report& report;

  const JobOptions& options() const { return invocation.config.options; }
};

std::string location(const RowSample& sample) { return fmt::format("token {}, head {}", sample.token, sample.head); }

// `whose`: "" or "theirs: ". `has_lse`: whether LSEs were compared.
void print_accuracy(const SingleRun& run, const Accuracy& all, std::string_view whose, bool has_lse = true) {
  if (all.compared == 0) {
    run.screen.print(fmt::format("  {}out: no value is finite both here and in fp64\n", whose));
  } else {
    run.screen.print(
        fmt::format("  {}out: greatest error {:.3g} at {}; allowed {:.3g} (the same-precision reference has {:.3g})\n",
                    whose, all.error, location(all.worst), all.allowed(), all.same_precision_error));
  }
  if (!has_lse) {
    // Nothing was compared.
  } else if (all.lse_allowed > 0.0) {
    run.screen.print(fmt::format("  {}lse: greatest error {:.3g} of what is allowed, at {}\n", whose, all.lse_error,
                                 location(all.worst_lse)));
  } else {
    run.screen.print(fmt::format("  {}lse: no value is finite both here and in fp64\n", whose));
  }
  if (all.misplaced > 0) {
    run.screen.print(fmt::format("  {}{} values are NaN or infinite where fp64 has another value, the first at {}\n",
                                 whose, all.misplaced, location(all.first_misplaced)));
  }
}

// Uses as many CPU threads as the job, because ranks on the same machine check at the same time.
Accuracy check_rows_of(const SingleRun& run, std::int64_t count, const TensorView& out, const RowView& lse,
                       std::vector<RowError>* each = nullptr) {
  return check_result(run.collective, run.input, run.prepared.tiles(), count, run.result.runs, out, lse,
                      run.prepared.threads(), each);
}

bool check_against_oracle(const SingleRun& run) {
  const AttentionSpec& spec = run.input.job().spec;
  const Accuracy all = check_rows_of(run, run.options().rows, run.result.out_view(spec), run.result.lse_view(spec));
  run.report.accuracy = all;
  run.screen.context(fmt::format("{} against the fp64 oracle", counted(static_cast<std::uint64_t>(all.rows), "row")));
  if (all.rows == 0) {
    run.screen.print("  the job has no rows: nothing is compared\n");
    return true;
  }
  print_accuracy(run, all, "");
  if (run.input.job().block_mask != nullptr) {
    const KeptMass kept = kept_mass(run.collective, run.input, run.options().rows, run.prepared.threads());
    run.screen.print(
        fmt::format("  the block mask keeps {:.2f} % of the softmax weight in the mean of {}, and at least {:.2f} %\n",
                    100.0 * kept.mean, counted(static_cast<std::uint64_t>(kept.rows), "row"), 100.0 * kept.minimum));
  }
  return all.passes();
}

// Compares another system's result with the fp64 oracle, and for information this job's result too. The verdict is on
// the other system's result. It may be wrong in any row, so all rows are compared if the job is small.
bool check_peer(const SingleRun& run) {
  const AttentionSpec& spec = run.input.job().spec;
  PeerFile::Rows rows;
  run.collective.run_collectively([&] { rows = run.peer->read(run.result.runs, spec.dtype); });
  const RowView own_lse = run.result.lse_view(spec);
  const std::int64_t count = chosen(run.invocation.config, "rows") ? run.options().rows : few_rows(run.input.job());
  std::vector<RowError> each;
  const bool has_lse = run.peer->has_lse();
  const Accuracy theirs = check_rows_of(run, count, rows.out, has_lse ? rows.lse : RowView{}, &each);
  const Accuracy ours = check_rows_of(run, count, run.result.out_view(spec), own_lse);
  run.report.accuracy = theirs;
  run.screen.context(fmt::format("{} of {} against the fp64 oracle",
                                 counted(static_cast<std::uint64_t>(theirs.rows), "row"), run.options().peer));
  print_accuracy(run, theirs, "theirs: ", has_lse);
  print_accuracy(run, ours, "ours: ", has_lse);
  if (!has_lse) run.screen.print("  theirs has no lse: only out is compared\n");
  if (const auto wrong = first_wrong_row(run.collective, theirs, each)) {
    const std::string of_lse = has_lse ? fmt::format(", of lse {:.3g} of what is allowed", wrong->lse_error) : "";
    run.screen.print(fmt::format("  the first wrong row of theirs: {}; error of out {:.3g}{}\n",
                                 location(wrong->sample), wrong->error, of_lse));
  }
  return theirs.passes();
}

bool check_against_file(const SingleRun& run) {
  const AttentionSpec& spec = run.input.job().spec;
  std::optional<Difference> mine;
  run.collective.run_collectively(
      [&] { mine = run.against->compare(run.result.runs, run.result.out_view(spec), run.result.lse_view(spec)); });
  const auto difference = earliest(run.collective, mine);
  run.screen.context(fmt::format("against {}, bit for bit", run.options().against));
  for (const std::string& other : run.against->other_job()) run.screen.context(other);
  if (difference) run.screen.print(fmt::format("  first difference: {}\n", describe(*difference, run.input.job())));
  return !difference;
}

bool check_golden(const SingleRun& run, const Golden& recorded) {
  Golden now = recorded;
  now.digest_out = run.report.digests->out;
  now.digest_lse = run.report.digests->lse;
  return check_golden(run.screen, run.options().golden, recorded, now);
}

bool write_golden(const SingleRun& run, Golden golden) {
  golden.digest_out = run.report.digests->out;
  golden.digest_lse = run.report.digests->lse;
  write_golden(run.screen, run.collective, run.options(), golden);
  return true;
}

// Runs the job once and checks the result. Returns whether it passes.
bool verify_single(const Invocation& invocation, const JobInput& input, const OutputFile* against, const PeerFile* peer,
                   const Options& library, const Screen& screen, Transport& world, Report& report) {
  const JobOptions& options = invocation.config.options;
  const Collective collective(world, Timeouts(options.timeout));
  PreparedFileJob prepared(input, world, library);
  gather_world(report, prepared, world, collective);
  print_job(screen, prepared, report);
  Golden golden = golden_of(input, prepared.kernel().name, prepared.backend().identity());
  if (!options.golden.empty()) golden = read_golden(collective, options.golden, golden);
  if (options.dry_run) {
    screen.context("dry run: nothing is computed");
    return true;
  }
  ProgressDisplay progress(options, world.rank() == 0);
  FileJobResult result =
      prepared.run([&](std::string_view what, const StepCount& steps) { progress.update(what, steps); });
  progress.clear();
  report.digests = result.digests;
  gather_figures(report, prepared, result.rank, world, collective);
  const SingleRun run{invocation, input, screen, against, peer, prepared, std::move(result.rank), collective, report};
  screen.context(fmt::format("digests: out {}, lse {}", report.digests->out, report.digests->lse));
  if (!options.record.empty()) return write_golden(run, std::move(golden));
  if (!options.golden.empty()) return check_golden(run, golden);
  if (peer != nullptr) return check_peer(run);
  return options.against == "oracle" ? check_against_oracle(run) : check_against_file(run);
}

// "32,768".
std::string with_commas(std::int64_t number) {
  std::string text = fmt::format("{}", number);
  for (std::size_t at = text.size(); at > 3;) text.insert(at -= 3, ",");
  return text;
}

// " (512 of 32,768 rows sampled)", after the verdict on another system's result; empty where all rows were compared.
std::string sampled_text(const JobOptions& options, const Report& report) {
  if (options.peer.empty() || !report.accuracy || !report.job) return {};
  const std::int64_t all = report.job->batch.q_tokens() * report.job->spec.heads;
  if (report.accuracy->rows >= all) return {};
  return fmt::format(" ({} of {} rows sampled)", with_commas(report.accuracy->rows), with_commas(all));
}

// Prints the verdict, writes the report, and returns the exit code.
int close_verdict(const Screen& screen, const JobOptions& options, const Collective& collective, Report& report,
                  bool pass) {
  report.verdict = pass ? "pass" : "fail";
  if (!options.dry_run) {
    const std::string_view verdict = !pass ? "FAIL" : options.record.empty() ? "PASS" : "RECORDED";
    screen.print(fmt::format("{}{}\n", screen.painted(verdict, pass ? Paint::kGood : Paint::kBad),
                             pass ? sampled_text(options, report) : ""));
  }
  collective.run_collectively([&] {
    if (collective.rank() == 0) write_report(report);
  });
  return pass ? 0 : static_cast<int>(ErrorCode::kWrongResult);
}

int verify_job(const Invocation& invocation, Transport& world, Report& report) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const bool first = world.rank() == 0;
  const Screen screen(options, first);
  const Collective collective(world, Timeouts(options.timeout));
  OpenedSource source;
  std::optional<JobInput> input;
  std::optional<OutputFile> against;
  std::optional<PeerFile> peer;
  Options library;
  collective.run_collectively([&] {
    check_flags(config);
    source = open_source(config, true);
    if (source.ssm) {
      if (options.peer.empty()) return;
      fail(ErrorCode::kUsage, fmt::format("{} is not for an SSM", config.origin("peer")),
           "it compares rows of out and lse with fp64", "Check an SSM with --against oracle.");
    }
    input.emplace(open_input(config, true, top_k_device(config, world)));
    if (first) warn_of_unseen_keys(config, *input);
    library = library_options(config);
    if (!options.against.empty() && options.against != "oracle") against.emplace(open_against(config, *input));
    if (!options.peer.empty()) peer.emplace(options.peer, *input);
    if (first) check_outputs(invocation);
  });
  if (source.ssm)
    return close_verdict(screen, options, collective, report, verify_ssm(invocation, screen, world, report));
  agree_on_input(collective, *input);
  if (config.given("input") || input->makes_cache()) {
    *input = decode_or_attend(std::move(*input), compatible_request(library.kernel, world), collective);
  }
  if (against) agree_on_files(collective, [&] { return against->fingerprints(); });
  if (peer) agree_on_files(collective, [&] { return peer->fingerprints(); });
  const bool shapes =
      options.against.empty() && options.record.empty() && options.golden.empty() && options.peer.empty();
  const bool pass = options.decode ? verify_decode(invocation, *input, library, screen, world, report)
                    : shapes       ? verify_shapes(invocation, *input, library, screen, world, report)
                             : verify_single(invocation, *input, against ? &*against : nullptr, peer ? &*peer : nullptr,
                                             library, screen, world, report);
  return close_verdict(screen, options, collective, report, pass);
}

}  // namespace

int verify_main(const Invocation& invocation, Transport* world) {
  return run_reported("verify", invocation, *world,
                      [&](Report& report) { return verify_job(invocation, *world, report); });
}

}  // namespace ringattn
