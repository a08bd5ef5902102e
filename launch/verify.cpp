// SPDX-License-Identifier: Apache-2.0
// `ringattn verify`: chooses the check of a job of any op: variants of it, an output file, the fp64 oracle, another
// system's result, a golden file, or decode steps.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/quotes.hpp"
#include "base/size.hpp"
#include "launch/commands.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/op_flags.hpp"
#include "launch/open_job.hpp"
#include "launch/outputs.hpp"
#include "launch/progress.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "launch/table.hpp"
#include "launch/verify_golden.hpp"
#include "ops/common/input_agreement.hpp"

namespace ringattn {

namespace {

// The arguments of every check.
struct Verification {
  const Invocation& invocation;
  const Options& op_options;
  const Screen& screen;
  Transport& world;
  const Collective& collective;
  Report& report;

  const Config& config() const { return invocation.config; }
  const JobOptions& options() const { return invocation.config.options; }
};

void check_flags(const Config& config) {
  const JobOptions& options = config.options;
  const int modes = (options.against.empty() ? 0 : 1) + (options.record.empty() ? 0 : 1) +
                    (options.golden.empty() ? 0 : 1) + (options.peer.empty() ? 0 : 1) + (options.decode ? 1 : 0);
  if (modes > 1) {
    fail(ErrorCode::kUsage, "--against, --record, --golden, --peer and --decode exclude each other",
         "one check at a time", "Leave out all but one of them.");
  }
  if (config.chosen("rows") && options.against != "oracle" && options.peer.empty() && !options.decode) {
    fail(ErrorCode::kUsage, fmt::format("{} needs --against oracle, --peer or --decode", config.origin("rows")),
         "it sets how many rows these checks compare", "Add one of them, or leave it out.");
  }
}

// A user may use --against for a check against another system, so the error for a missing file suggests --peer.
void open_earlier(const Config& config, OpJob& job) {
  const std::string& path = config.options.against;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    fail(ErrorCode::kFile, fmt::format("{} {} can't be opened", config.origin("against"), in_quotes(path)),
         "there is no such file; it takes an output file of `run`, or the word oracle",
         "To check another system, save its out and use --peer FILE.");
  }
  job.open_earlier(path);
}

bool end_dry_run(const Screen& screen) {
  screen.context("dry run: nothing is computed");
  return true;
}

// Prints the rows of a table of variants one by one, and the first difference.
class Verdicts {
 public:
  Verdicts(const Screen& screen, const VariantTable& variants) : screen_(screen), table_(columns(variants)) {}

  // `verdict`: for a variant without a difference.
  void add(std::vector<std::string> cells, const std::string& difference, std::string_view verdict) {
    cells.emplace_back(difference.empty() ? verdict : "FAIL");
    table_.add(std::move(cells));
    if (first_.empty()) first_ = difference;
  }
  // Returns whether there is no difference.
  bool print() const {
    screen_.print(table_.text());
    if (!first_.empty()) screen_.print(fmt::format("  first difference: {}\n", first_));
    return first_.empty();
  }

 private:
  static std::vector<Table::Column> columns(const VariantTable& variants) {
    std::vector<Table::Column> columns;
    for (const Cell& column : variants.columns) columns.push_back({column.title, column.unit});
    columns.push_back({"verdict"});
    return columns;
  }

  const Screen& screen_;
  Table table_;
  std::string first_;
};

std::vector<int> world_sizes(const Config& config, const Transport& world) {
  const bool chosen = config.given("ranks") || !world.name().ends_with("threads");
  if (!chosen) return {1, 2, 3, 4, kLargestLocalWorld};
  std::vector<int> sizes(static_cast<std::size_t>(world.size()));
  std::iota(sizes.begin(), sizes.end(), 1);
  return sizes;
}

// Runs the variants of the job. Settings that the user gave are the same in all variants.
bool verify_variants(const Verification& v) {
  OpJob& job = *v.report.job;
  // Throws on every rank the errors that the variants would throw: no kernel, ranks that differ, too little memory.
  prepare_job(v.report, v.op_options, v.world, v.collective);
  print_job(v.screen, v.report);
  VariantRequest request;
  request.ranks = world_sizes(v.config(), v.world);
  if (v.config().given("layout") || v.config().given("stripe")) request.layout = v.op_options.layout;
  if (v.config().given("block")) request.block = v.op_options.block_tokens;
  request.page_size = v.config().given("page-size");
  const VariantTable variants = job.list_variants(request, v.op_options);
  v.screen.context(fmt::format("{} shapes, bit for bit", variants.count));
  for (const std::string& note : variants.notes) v.screen.context(note);
  if (v.options().dry_run) return end_dry_run(v.screen);
  ProgressDisplay progress(v.options(), v.world.rank() == 0);
  Verdicts verdicts(v.screen, variants);
  std::int64_t done = 0;
  job.run_variants(v.world, [&](std::vector<std::string> cells, const std::string& difference) {
    verdicts.add(std::move(cells), difference, done == 0 ? "baseline" : "PASS");
    progress.update("shape", {++done, variants.count});
  });
  progress.clear();
  return verdicts.print();
}

bool verify_decode(const Verification& v) {
  const std::shared_ptr<OpJob> steps = v.report.job;
  v.collective.run_collectively([&] { v.report.job = steps->prefill_of_replay(); });
  prepare_job(v.report, v.op_options, v.world, v.collective);
  print_job(v.screen, v.report);
  if (v.options().dry_run) return end_dry_run(v.screen);
  ProgressDisplay progress(v.options(), v.world.rank() == 0);
  Verdicts verdicts(v.screen, steps->replay_table());
  steps->replay(
      v.options().rows, v.op_options, v.world,
      [&](std::string_view what, const StepCount& count) { progress.update(what, count); },
      [&](const RankFigures& figures, std::vector<ResultDigest> digests) {
        v.report.digests = std::move(digests);
        gather_figures(v.report, figures, v.world, v.collective);
      },
      [&](std::vector<std::string> cells, const std::string& difference) {
        verdicts.add(std::move(cells), difference, "PASS");
      });
  progress.clear();
  v.screen.context(fmt::format("digests of the prefill: {}", digests_text(v.report.digests)));
  v.screen.context(fmt::format("the last {} of each sequence, decoded one by one, against the prefill, bit for bit",
                               counted(static_cast<std::uint64_t>(v.options().rows), "row")));
  return verdicts.print();
}

bool print_check(const Verification& v, const Check& check) {
  for (const std::string& line : check.context) v.screen.context(line);
  for (const std::string& line : check.lines) v.screen.print(fmt::format("  {}\n", line));
  v.report.accuracy = check.write;
  return check.passes;
}

// Runs the job once and checks the result. Returns whether it passes. `compared`: receives the number of rows compared
// with fp64.
bool verify_single(const Verification& v, std::int64_t& compared) {
  const JobOptions& options = v.options();
  OpJob& job = *v.report.job;
  prepare_job(v.report, v.op_options, v.world, v.collective);
  print_job(v.screen, v.report);
  Golden golden = job.golden();
  Golden recorded;
  if (!options.golden.empty()) recorded = read_golden(v.collective, options.golden, golden);
  if (options.dry_run) return end_dry_run(v.screen);
  ProgressDisplay progress(options, v.world.rank() == 0);
  const RankFigures mine =
      job.run([&](std::string_view what, const StepCount& steps) { progress.update(what, steps); });
  v.report.digests = job.digests(v.collective);
  progress.clear();
  gather_figures(v.report, mine, v.world, v.collective);
  v.screen.context(fmt::format("digests: {}", digests_text(v.report.digests)));
  set_digests(golden, v.report.digests);
  if (!options.record.empty()) {
    write_golden(v.screen, v.collective, options, golden);
    return true;
  }
  if (!options.golden.empty()) return check_golden(v.screen, options.golden, recorded, golden);
  if (!options.peer.empty()) {
    const Check check = job.check_peer(v.collective, v.config().chosen("rows") ? options.rows : 0);
    v.screen.context(fmt::format("{} of {} against the fp64 oracle",
                                 counted(static_cast<std::uint64_t>(check.rows), "row"), options.peer));
    compared = check.rows;
    return print_check(v, check);
  }
  if (options.against == "oracle") return print_check(v, job.check_oracle(v.collective, options.rows));
  const Check check = job.check_earlier(v.collective);
  v.screen.context(fmt::format("against {}, bit for bit", options.against));
  return print_check(v, check);
}

// "32,768".
std::string with_commas(std::int64_t number) {
  std::string text = fmt::format("{}", number);
  for (std::size_t at = text.size(); at > 3;) text.insert(at -= 3, ",");
  return text;
}

// Prints the verdict, writes the report, and returns the exit code. `compared`: number of compared rows of another
// system's result; 0: there is no such result.
int close_verdict(const Verification& v, bool pass, std::int64_t compared) {
  v.report.verdict = pass ? "pass" : "fail";
  if (!v.options().dry_run) {
    const std::int64_t all = compared == 0 ? 0 : v.report.job->result_rows();
    const std::string sampled =
        compared < all ? fmt::format(" ({} of {} rows sampled)", with_commas(compared), with_commas(all)) : "";
    const std::string_view verdict = !pass ? "FAIL" : v.options().record.empty() ? "PASS" : "RECORDED";
    v.screen.print(
        fmt::format("{}{}\n", v.screen.painted(verdict, pass ? Paint::kGood : Paint::kBad), pass ? sampled : ""));
  }
  v.collective.run_collectively([&] {
    if (v.collective.rank() == 0) write_report(v.report);
  });
  return pass ? 0 : static_cast<int>(ErrorCode::kWrongResult);
}

int verify_job(const Invocation& invocation, Transport& world, Report& report) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const bool first = world.rank() == 0;
  const Screen screen(options, first);
  const Collective collective(world, Timeouts(options.timeout));
  const bool earlier = !options.against.empty() && options.against != "oracle";
  collective.run_collectively([&] { check_flags(config); });
  report.job = open_job(config, OpUse::kVerify, world, collective);
  OpJob& job = *report.job;
  Options op_options;
  collective.run_collectively([&] {
    op_options = library_options(config);
    if (earlier) open_earlier(config, job);
    if (!options.peer.empty()) job.open_peer(options.peer);
    if (first) check_outputs(invocation);
  });
  if (earlier) agree_on_files(collective, [&] { return job.earlier_fingerprints(); });
  if (!options.peer.empty()) agree_on_files(collective, [&] { return job.peer_fingerprints(); });
  const Verification v{invocation, op_options, screen, world, collective, report};
  const bool variants =
      options.against.empty() && options.record.empty() && options.golden.empty() && options.peer.empty();
  std::int64_t compared = 0;
  const bool pass = options.decode ? verify_decode(v) : variants ? verify_variants(v) : verify_single(v, compared);
  return close_verdict(v, pass, compared);
}

}  // namespace

int verify_main(const Invocation& invocation, Transport* world) {
  return run_reported("verify", invocation, *world,
                      [&](Report& report) { return verify_job(invocation, *world, report); });
}

}  // namespace ringattn
