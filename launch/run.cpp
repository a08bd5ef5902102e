// SPDX-License-Identifier: Apache-2.0
// `ringattn run`: the job.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/size.hpp"
#include "launch/commands.hpp"
#include "launch/help.hpp"
#include "launch/input_warnings.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/outputs.hpp"
#include "launch/progress.hpp"
#include "launch/report.hpp"
#include "launch/run_end.hpp"
#include "launch/run_ssm.hpp"
#include "launch/screen.hpp"
#include "launch/ssm_request.hpp"
#include "launch/table.hpp"
#include "launch/trace.hpp"
#include "ops/common/file_job.hpp"

namespace ringattn {

namespace {

std::string percent(double part, double whole) {
  return fmt::format("{:.1f}", whole > 0.0 ? 100.0 * part / whole : 0.0);
}

std::string dims_text(const AttentionSpec& spec) {
  return spec.head_dim_v == spec.head_dim ? fmt::format("{}", spec.head_dim)
                                          : fmt::format("{}/{}", spec.head_dim, spec.head_dim_v);
}

// One word, for a column.
std::string mask_text(const AttentionSpec& spec) {
  std::string mask = describe(spec.mask);
  std::replace(mask.begin(), mask.end(), ' ', ':');
  return mask;
}

std::string mebibytes(std::size_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / 0x1p20); }

void print_decode_result(const Report& report, const JobInput& input, const Screen& screen, bool quiet) {
  const Job& job = input.job();
  const AttentionSpec& spec = job.spec;
  const double seconds = report.slowest_seconds();
  Table table({{"keys"},
               {"seqs"},
               {"rows"},
               {"page"},
               {"heads"},
               {"kv"},
               {"dim"},
               {"dtype"},
               {"mask"},
               {"step", "(us)"},
               {"GB/s", "all ranks"},
               {"mem/rank", "(MiB)"},
               {"digest of out"}});
  table.add({fmt::format("{}", job.batch.k_tokens()), fmt::format("{}", job.batch.sequences.size()),
             fmt::format("{}", job.batch.q_tokens()),
             input.pages() == nullptr ? "dense" : fmt::format("{}", input.pages()->page_size),
             fmt::format("{}", spec.heads), fmt::format("{}", spec.kv_heads), dims_text(spec),
             std::string(dtype_name(spec.dtype)), mask_text(spec), fmt::format("{:.2f}", seconds * 1e6),
             fmt::format("{:.1f}", seconds > 0.0 ? report.plan->bytes_read / seconds * 1e-9 : 0.0),
             mebibytes(report.memory_peak()), report.digests->out});
  screen.print(table.text(!quiet));
}

void print_result(const Report& report, const Job& job, const Screen& screen, bool quiet) {
  const AttentionSpec& spec = job.spec;
  const double rate = report.flops_per_second_per_rank();
  const bool tera = rate >= 1e12;
  Table table({{"tokens"},
               {"seqs"},
               {"heads"},
               {"kv"},
               {"dim"},
               {"dtype"},
               {"mask"},
               {"time", "(ms)"},
               {tera ? "TFLOP/s" : "GFLOP/s", "per rank"},
               {"exposed comm", "(%)"},
               {"mem/rank", "(MiB)"},
               {"digest of out"}});
  table.add({fmt::format("{}", job.batch.q_tokens()), fmt::format("{}", job.batch.sequences.size()),
             fmt::format("{}", spec.heads), fmt::format("{}", spec.kv_heads), dims_text(spec),
             std::string(dtype_name(spec.dtype)), mask_text(spec),
             fmt::format("{:.3f}", report.slowest_seconds() * 1e3), fmt::format("{:.1f}", rate / (tera ? 1e12 : 1e9)),
             percent(report.max_exposed_comm_seconds(), report.slowest_seconds()), mebibytes(report.memory_peak()),
             report.digests->out});
  screen.print(table.text(!quiet));
}

void print_details(const Report& report, const Screen& screen) {
  for (std::size_t rank = 0; rank < report.figures.size(); ++rank) {
    const RankFigures& figures = report.figures[rank];
    screen.detail(fmt::format("rank {} on {}: {} tokens, {:.3f} ms, {:.3f} ms exposed comm, received {}, peak {}", rank,
                              report.hosts[rank], figures.tokens, figures.seconds * 1e3,
                              figures.exposed_comm_seconds * 1e3,
                              format_bytes(static_cast<double>(figures.bytes_received)),
                              format_bytes(static_cast<double>(figures.memory_peak))));
  }
  const NonFinite total = report.non_finite();
  if (total.total() > 0) {
    const bool latents = report.op == Op::kMla;
    screen.context(fmt::format("note: {} values of q, {} of {} and {} of {} are NaN or infinite", total.q, total.k,
                               latents ? "latents and rotary keys" : "k", total.v, latents ? "matrices" : "v"));
  }
}

int run_job(const Invocation& invocation, Transport& world, Report& report) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const bool first = world.rank() == 0;
  const Screen screen(options, first);
  const Collective collective(world, Timeouts(options.timeout));

  OpenedSource source;
  collective.run_collectively([&] { source = open_source(config, true); });
  if (source.ssm) return run_ssm(invocation, world, report);
  FileJob job;
  Options library;
  std::optional<JobInput> input;  // open until the job has opened it, too
  collective.run_collectively([&] {
    job = file_job(config);
    input.emplace(open_input(config, true, top_k_device(config, world)));
    if (first) warn_of_unseen_keys(config, *input);
    library = library_options(config);
    if (first) check_outputs(invocation);
  });
  PreparedFileJob prepared(std::move(job), world, std::move(library));
  input.reset();
  source = {};
  gather_world(report, prepared, world, collective);
  print_job(screen, prepared, report);
  if (options.dry_run) return end_dry_run(screen, report, collective);

  ProgressDisplay progress(options, first);
  const FileJobResult result =
      prepared.run([&](std::string_view what, const StepCount& steps) { progress.update(what, steps); });
  progress.clear();
  report.digests = result.digests;
  gather_figures(report, prepared, result.rank, world, collective);
  prepared.write(result);
  std::vector<std::vector<BlockTimes>> timeline;
  if (!options.trace.empty()) timeline = gather_block_times(result.rank.stats.blocks, collective);
  const auto print = [&] {
    print_details(report, screen);
    if (prepared.input().decodes()) {
      print_decode_result(report, prepared.input(), screen, options.quiet);
    } else {
      print_result(report, prepared.input().job(), screen, options.quiet);
    }
  };
  return end_run(screen, report, collective, print, [&] { return trace_text(timeline, report.hosts); });
}

}  // namespace

int run_main(const Invocation& invocation, Transport* world) {
  return run_reported("run", invocation, *world, [&](Report& report) { return run_job(invocation, *world, report); });
}

}  // namespace ringattn
