// SPDX-License-Identifier: Apache-2.0
// `ringattn verify`: the choice among its checks, and those of a single run: against an output file, against fp64, and
// against a golden file. The comparison of shapes is verify_shapes.cpp.
#include <fmt/format.h>

#include <memory>

#include "attention/check/accuracy.hpp"
#include "attention/check/difference.hpp"
#include "attention/check/golden.hpp"
#include "base/build.hpp"
#include "base/size.hpp"
#include "base/text_file.hpp"
#include "launch/commands.hpp"
#include "launch/execution.hpp"
#include "launch/job_input.hpp"
#include "launch/job_text.hpp"
#include "launch/outputs.hpp"
#include "launch/progress.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "launch/verify_shapes.hpp"

namespace ringattn {

namespace {

constexpr std::uint64_t kSampleSeed = 20;  // any; the same rows each time

void check_flags(const Config& config) {
  const JobOptions& options = config.options;
  const int modes =
      (options.against.empty() ? 0 : 1) + (options.record.empty() ? 0 : 1) + (options.golden.empty() ? 0 : 1);
  if (modes > 1) {
    fail(ErrorCode::kUsage, "--against, --record and --golden exclude each other", "one check at a time",
         "Leave out all but one of them.");
  }
  if (config.given("rows") && options.against != "oracle") {
    fail(ErrorCode::kUsage, fmt::format("{} needs --against oracle", config.origin("rows")), "it samples rows for it",
         "Add --against oracle, or leave it out.");
  }
}

// One run of the job in its own shape.
struct SingleRun {
  const Invocation& invocation;
  const JobInput& input;
  const Screen& screen;
  Attention& attention;
  RankResult result;
  const Meeting& meeting;
  Report& report;

  const JobOptions& options() const { return invocation.config.options; }
};

std::string place(const RowSample& sample) { return fmt::format("token {}, head {}", sample.token, sample.head); }

bool check_against_oracle(const SingleRun& run) {
  const JobInput& input = run.input;
  const int threads = run.attention.options().threads;  // of the processors that this rank shares with others
  const auto reader = [&input, threads](SyntheticTensor tensor) {
    return [&input, threads, tensor](std::span<const PackedRun> runs, const MutableTensorView& rows) {
      input.read(tensor, runs, rows, threads);
    };
  };
  const AccuracyInputs inputs{input.job(),
                              run.attention.plan().kernel,
                              input.sinks().empty() ? nullptr : input.sinks().data(),
                              reader(SyntheticTensor::kQ),
                              reader(SyntheticTensor::kK),
                              reader(SyntheticTensor::kV),
                              threads};
  const FoldSpec& spec = input.job().spec;
  const std::vector<RowSample> samples = sample_rows(input.job(), run.options().rows, kSampleSeed);
  Accuracy mine;
  // One rank may own all the sampled rows; a processor computes some 1e9 products a second in fp64.
  const double products = static_cast<double>(samples.size()) * static_cast<double>(input.job().batch.k_tokens()) *
                          (spec.head_dim + spec.head_dim_v);
  run.meeting.together(
      [&] {
        mine = check_rows(inputs, samples, run.result.runs, run.result.out_view(spec), run.result.lse_view(spec));
      },
      products * 1e-9);
  const Accuracy all = combine(run.meeting, mine);
  run.report.accuracy = all;
  run.screen.context(fmt::format("{} against the fp64 oracle", counted(static_cast<std::uint64_t>(all.rows), "row")));
  if (all.rows == 0) {
    run.screen.print("  the job has no rows: nothing is compared\n");
    return true;
  }
  if (all.compared == 0) {
    run.screen.print("  out: no value is finite here and in fp64\n");
  } else {
    run.screen.print(
        fmt::format("  out: greatest error {:.3g} at {}; allowed {:.3g} (a straightforward computation has {:.3g})\n",
                    all.error, place(all.worst), all.allowed(), all.straightforward_error));
  }
  if (all.lse_allowed > 0.0) {
    run.screen.print(
        fmt::format("  lse: greatest error {:.3g} of what is allowed, at {}\n", all.lse_error, place(all.worst_lse)));
  } else {
    run.screen.print("  lse: no value is finite here and in fp64\n");
  }
  if (all.misplaced > 0) {
    run.screen.print(fmt::format("  {} values are NaN or infinite where fp64 has others, the first at {}\n",
                                 all.misplaced, place(all.first_misplaced)));
  }
  return all.passes();
}

[[noreturn]] void refuse_file(const std::string& path, const TensorSource& tensor, std::span<const std::int64_t> shape,
                              std::string_view dtype) {
  fail(ErrorCode::kFile, fmt::format("{} can't be compared", path),
       fmt::format("{} is {} {}, the job gives {} {}", tensor.text(), file_dtype_name(tensor.info->dtype),
                   shape_text(tensor.info->shape), dtype, shape_text(shape)),
       "Give the job that the file was made with.");
}

struct AgainstFile {
  std::unique_ptr<const SafetensorsFile> file;
  TensorSource out;
  TensorSource lse;
};

// An output file of `run` for a job of this shape; throws kFile if it isn't one.
AgainstFile open_against(const std::string& path, const JobInput& input) {
  AgainstFile against{std::make_unique<const SafetensorsFile>(path), {}, {}};
  for (const std::string_view name : {"out", "lse"}) {
    if (against.file->contains(name)) continue;
    fail(ErrorCode::kFile, fmt::format("{} can't be compared", path), fmt::format("it has no tensor {}", name),
         "--against takes an output file of `ringattn run`.");
  }
  against.out = against.file->tensor("out");
  against.lse = against.file->tensor("lse");
  const RowGrid& grid = input.out_grid();
  const FileDtype dtype = file_dtype(input.job().spec.dtype);
  if (against.out.info->shape != grid.shape() || against.out.info->dtype != dtype) {
    refuse_file(path, against.out, grid.shape(), file_dtype_name(dtype));
  }
  if (against.lse.info->shape != lse_shape(grid) || against.lse.info->dtype != FileDtype::kF32) {
    refuse_file(path, against.lse, lse_shape(grid), file_dtype_name(FileDtype::kF32));
  }
  return against;
}

bool check_against_file(const SingleRun& run) {
  const FoldSpec& spec = run.input.job().spec;
  const RowGrid& grid = run.input.out_grid();
  const RowGrid lse = lse_grid(grid);
  const std::int64_t rows = run.result.rows;
  std::optional<Difference> mine;
  run.meeting.together([&] {
    const AgainstFile against = open_against(run.options().against, run.input);
    const Buffer out_bytes = allocate_host(run.result.out.bytes());
    const Buffer lse_bytes = allocate_host(run.result.lse.bytes());
    const MutableTensorView out_rows =
        dense_view(static_cast<void*>(out_bytes.data()), spec.dtype, rows, spec.heads, spec.head_dim_v);
    const MutableTensorView lse_rows =
        dense_view(static_cast<void*>(lse_bytes.data()), Dtype::kF32, rows, spec.heads, 1);
    read_rows(against.out, grid, run.result.runs, out_rows);
    read_rows(against.lse, lse, run.result.runs, lse_rows);
    mine = first_difference(false, run.result.out_view(spec), out_rows, run.result.runs);
    if (!mine) {
      const TensorView computed =
          dense_view(static_cast<const void*>(run.result.lse.data()), Dtype::kF32, rows, spec.heads, 1);
      mine = first_difference(true, computed, lse_rows, run.result.runs);
    }
  });
  const auto difference = earliest(run.meeting, mine);
  run.screen.context(fmt::format("against {}, bit for bit", run.options().against));
  if (difference) run.screen.print(fmt::format("  first difference: {}\n", describe(*difference, run.input.job())));
  return !difference;
}

// What a golden file of this job would hold, but for the digests.
Golden golden_of(const JobInput& input, Attention& attention, bool synthetic) {
  const Job& job = input.job();
  std::string sequences;
  if (job.batch.sequences.size() <= 8) {
    for (const Sequence& s : job.batch.sequences) sequences += fmt::format(" {}x{}@{}", s.q_len, s.k_len, s.q_offset);
  }
  const std::string source = synthetic ? input.source() : "a file";
  return {std::string(version()),
          std::string(git_revision()),
          build_id(),
          std::string(attention.kernel().row->name),
          attention.backend().identity(),
          fmt::format("{}; {}; scale {};{}", source, job_text(job), job.spec.softmax_scale, sequences),
          {},
          {}};
}

// Before anything is computed: the file is sound, and of this job and program.
Golden read_golden(const std::string& path, const Golden& now) {
  Golden recorded = parse_golden(read_text_file(path), path);
  check_comparable(recorded, now, path);
  return recorded;
}

bool check_golden(const SingleRun& run, const Golden& recorded) {
  const Digests& now = *run.report.digests;
  run.screen.context(
      fmt::format("against {}, recorded by version {} (git {})", run.options().golden, recorded.version, recorded.git));
  const bool same = recorded.digest_out == now.out && recorded.digest_lse == now.lse;
  if (!same) {
    run.screen.print(fmt::format("  out: recorded {}, now {}\n  lse: recorded {}, now {}\n", recorded.digest_out,
                                 now.out, recorded.digest_lse, now.lse));
  }
  return same;
}

bool write_golden(const SingleRun& run, Golden golden) {
  golden.digest_out = run.report.digests->out;
  golden.digest_lse = run.report.digests->lse;
  run.meeting.together([&] {
    if (run.meeting.rank() != 0) return;
    write_text_file(run.options().record, golden_text(golden), run.options().force, "record");
  });
  run.screen.context(fmt::format("golden file: {}", run.options().record));
  return true;
}

// Checks that need a single run; true if it passes.
bool verify_single(const Invocation& invocation, const JobInput& input, const Options& library, const Screen& screen,
                   Transport& world, Report& report) {
  const JobOptions& options = invocation.config.options;
  const Meeting meeting(world, Patience(options.timeout));
  Attention attention(input.job(), world, library);
  gather_world(report, attention, world, meeting);
  print_job(screen, input, attention, report);
  Golden golden = golden_of(input, attention, options.synthetic.has_value());
  meeting.together([&] {
    if (!options.golden.empty()) golden = read_golden(options.golden, golden);
  });
  if (options.dry_run) {
    screen.context("dry run: nothing is computed");
    return true;
  }
  ProgressDisplay progress(options, world.rank() == 0);
  RankResult result = execute_job(
      input, attention, meeting,
      [&](std::string_view what, std::int64_t done, std::int64_t all) { progress.update(what, done, all); });
  progress.clear();
  report.digests = digest_result(input, result, meeting);
  gather_figures(report, attention, result, world, meeting);
  const SingleRun run{invocation, input, screen, attention, std::move(result), meeting, report};
  screen.context(fmt::format("digests: out {}, lse {}", report.digests->out, report.digests->lse));
  if (!options.record.empty()) return write_golden(run, std::move(golden));
  if (!options.golden.empty()) return check_golden(run, golden);
  return options.against == "oracle" ? check_against_oracle(run) : check_against_file(run);
}

int verify_job(const Invocation& invocation, Transport& world, Report& report) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const bool first = world.rank() == 0;
  const Screen screen(options, first);
  const Meeting meeting(world, Patience(options.timeout));
  std::optional<JobInput> input;
  Options library;
  meeting.together([&] {
    check_flags(config);
    input.emplace(config, true);
    library = library_options(config, input->job());
    if (!options.against.empty() && options.against != "oracle") open_against(options.against, *input);
    if (first) check_outputs(options);
  });
  const bool shapes = options.against.empty() && options.record.empty() && options.golden.empty();
  const bool pass = shapes ? verify_shapes(invocation, *input, library, screen, world, report)
                           : verify_single(invocation, *input, library, screen, world, report);
  report.verdict = pass ? "pass" : "fail";
  if (!options.dry_run) {
    const std::string_view verdict = !pass ? "FAIL" : options.record.empty() ? "PASS" : "RECORDED";
    screen.print(fmt::format("{}\n", screen.painted(verdict, pass ? Paint::kGood : Paint::kBad)));
  }
  meeting.together([&] {
    if (first) write_report(report);
  });
  return pass ? 0 : static_cast<int>(ErrorCode::kWrongResult);
}

}  // namespace

int verify_main(const Invocation& invocation, Transport* world) {
  return run_reported("verify", invocation, *world,
                      [&](Report& report) { return verify_job(invocation, *world, report); });
}

}  // namespace ringattn
