// SPDX-License-Identifier: Apache-2.0
#include "launch/bench_quick.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/bench_output.hpp"
#include "launch/bench_sweep.hpp"
#include "launch/command_line.hpp"
#include "launch/help.hpp"
#include "launch/job_request.hpp"
#include "launch/model_layer.hpp"
#include "launch/op_flags.hpp"
#include "launch/outputs.hpp"
#include "launch/torch_peer.hpp"

namespace ringattn {

namespace {

constexpr double kPeerSeconds = 12.0;    // for PyTorch's last answer, after the planned time
constexpr double kImportSeconds = 25.0;  // `import torch` with cold disks

// A job in several sizes.
struct Series {
  std::string_view name;      // in the table
  std::string_view flags;     // of bench
  std::int64_t total_tokens;  // short sequences are batched up to it; 0: --batch says
  double exponent;            // the time of a sequence grows with this power of its tokens
  std::array<int, 5> sizes;   // tokens of a sequence, ascending; the rest is 0
  bool all;  // true: measure every size except the first, as time permits; false: only the largest possible one
};

// The first size of a series is small enough for any machine. It is in the table only if there is no time for a larger
// one.
constexpr Series kOnGpu[] = {
    {"d128-h32/8-causal", "--heads 32 --kv-heads 8", 16384, 2.0, {512, 1024, 8192, 32768, 131072}, true},
    {"d128-h32/8-full", "--heads 32 --kv-heads 8 --mask full", 0, 2.0, {1024, 8192, 32768}, false},
    {"d64-h32/32-causal", "--heads 32 --kv-heads 32 --head-dim 64", 0, 2.0, {1024, 8192, 32768}, false},
    {"d256-h8/8-causal", "--heads 8 --kv-heads 8 --head-dim 256", 0, 2.0, {1024, 8192, 32768}, false},
    {"d128-h32/8-causal", "--backward --heads 32 --kv-heads 8", 0, 2.0, {1024, 4096, 16384}, false},
    {"d128-h32/8", "--op decode --batch 32 --heads 32 --kv-heads 8", 0, 1.0, {1024, 4096}, false},
    {"d128-h32/8", "--op decode --heads 32 --kv-heads 8", 0, 1.0, {4096, 65536}, false},
    {"4096-to-4096", "--op linear --in-features 4096 --out-features 4096", 0, 1.0, {1024, 4096, 16384}, false},
};
constexpr Series kOnCpu[] = {
    {"d128-h32/8-causal", "--heads 32 --kv-heads 8", 0, 2.0, {256, 1024, 4096, 16384, 65536}, true},
    {"d64-h32/32-causal", "--heads 32 --kv-heads 32 --head-dim 64", 0, 2.0, {256, 1024, 4096, 16384}, false},
    {"d128-h32/8-causal", "--backward --heads 32 --kv-heads 8", 0, 2.0, {128, 512, 2048, 8192}, false},
    {"d128-h32/8", "--op decode --heads 32 --kv-heads 8", 0, 1.0, {1024, 4096, 32768}, false},
    {"4096-to-4096", "--op linear --in-features 4096 --out-features 4096", 0, 1.0, {32, 128, 512, 2048}, false},
};

constexpr double weight(const Series& series) { return series.all ? 3.0 : 1.0; }  // share of the time

std::int64_t sequences(const Series& series, std::int64_t size) {
  return std::max<std::int64_t>(1, series.total_tokens / size);
}

// The time of a job is proportional to this.
double work(const Series& series, std::int64_t size) {
  return static_cast<double>(sequences(series, size)) * std::pow(static_cast<double>(size), series.exponent);
}

// --samples of a job whose run takes `seconds`: the usual number if runs are short, otherwise as many as fit into half
// a second, but at least 3.
std::int64_t samples_for(double seconds) {
  constexpr double kSampled = 0.5;
  if (seconds * 10.0 <= kSampled) return 0;
  return std::max<std::int64_t>(3, static_cast<std::int64_t>(kSampled / seconds));
}

// Seconds of warm-up and samples.
double sampling_seconds(double seconds) {
  const std::int64_t samples = samples_for(seconds);
  return samples == 0 ? 0.5 + 2.0 * seconds : seconds * static_cast<double>(samples + 2);
}

struct Row {
  const Series* series;
  BenchPoint ours;
  std::optional<BenchPoint> theirs;
};

void check_flags(const Config& config, int ranks) {
  constexpr std::string_view kAllowed[] = {"quick", "threads", "backend", "timeout"};
  for (const ConfigValue& value : config.values) {
    const std::string_view name = value.row->name;
    if (value.row->group == FlagGroup::kOutput || std::ranges::find(kAllowed, name) != std::end(kAllowed)) continue;
    if (!config.chosen(name)) continue;
    fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(name), config.origin("quick")),
         "--quick chooses the jobs, for one rank", "Leave one of them out.");
  }
  if (ranks > 1) {
    fail(ErrorCode::kUsage, fmt::format("{} is for one rank", config.origin("quick")),
         fmt::format("this world has {}", ranks), "Start one process, without mpirun.");
  }
  check_one_stdout(config);
}

class QuickBench {
 public:
  QuickBench(const Invocation& invocation, Transport& world, double planned_seconds)
      : invocation_(invocation),
        options_(invocation.config.options),
        world_(world),
        screen_(options_, true),
        silent_(options_, false),
        lines_(options_),
        planned_(Deadline::after(planned_seconds)),
        last_(Deadline::after(planned_seconds + kPeerSeconds)) {}

  int run();

 private:
  double seconds() const { return planned_.seconds() + planned_.overdue(); }  // since the start
  double seconds_left() const { return -planned_.overdue(); }

  Invocation invocation_of(const Series& series, std::int64_t size, std::int64_t samples) const;
  // Returns whether the kernels work on a GPU, and the number of threads if they do not.
  std::pair<bool, int> find_device();
  BenchPoint measure_ours(const Series& series, std::int64_t size, std::int64_t samples, BenchLines& lines);
  // `share`: seconds for the whole series.
  void measure_series(const Series& series, double share);
  void measure_row(const Series& series, std::int64_t size, double seconds);
  void note(const Series& series, const BenchPoint& point, std::string_view who);
  Table table() const;
  int finish();

  const Invocation& invocation_;
  const JobOptions& options_;
  Transport& world_;
  const Screen screen_;
  const Screen silent_;
  BenchLines lines_;
  const Deadline planned_;
  const Deadline last_;
  std::optional<TorchPeer> peer_;
  std::vector<Row> rows_;
  std::string first_error_;
};

Invocation QuickBench::invocation_of(const Series& series, std::int64_t size, std::int64_t samples) const {
  std::vector<std::string> words;
  for (std::string_view left = series.flags; !left.empty();) {
    const std::size_t space = std::min(left.find(' '), left.size());
    words.emplace_back(left.substr(0, space));
    left.remove_prefix(std::min(space + 1, left.size()));
  }
  words.insert(words.end(), {"--seq", fmt::format("{}", size)});
  if (series.total_tokens > 0) words.insert(words.end(), {"--total-tokens", fmt::format("{}", series.total_tokens)});
  if (samples > 0) words.insert(words.end(), {"--samples", fmt::format("{}", samples)});
  for (const std::string_view flag : {"threads", "backend", "timeout"}) {
    if (!invocation_.config.chosen(flag)) continue;
    words.insert(words.end(), {fmt::format("--{}", flag), invocation_.config.value(flag).text});
  }
  Invocation one = invocation_;
  one.arguments = {invocation_.arguments.front(), "bench"};
  one.arguments.insert(one.arguments.end(), words.begin(), words.end());
  one.config = load_config(kBench, split_command_line(kBench, "bench", words).flags);
  one.config.options.progress = options_.progress;
  fill_from_model(one.config);
  fill_backward_op(one.config);
  return one;
}

std::pair<bool, int> QuickBench::find_device() {
  const Invocation one = invocation_of(kOnCpu[0], kOnCpu[0].sizes[0], 1);
  const Collective collective(world_, Timeouts(options_.timeout));
  const std::shared_ptr<OpJob> job = open_settings(one.config, world_, collective).front().opened;
  job->prepare(world_, library_options(one.config));
  const std::pair<bool, int> found{job->backend().memory() == MemoryKind::kDevice, job->threads()};
  job->release();
  return found;
}

BenchPoint QuickBench::measure_ours(const Series& series, std::int64_t size, std::int64_t samples, BenchLines& lines) {
  const Invocation one = invocation_of(series, size, samples);
  const Collective collective(world_, Timeouts(options_.timeout));
  const std::vector<Setting> settings = open_settings(one.config, world_, collective);
  Sweep sweep(one, world_, silent_, lines);
  sweep.measure(settings.front(), false);
  return sweep.points().front();
}

void QuickBench::note(const Series& series, const BenchPoint& point, std::string_view who) {
  const std::string text =
      fmt::format("{} {}, {} tokens: {}: {}", point.job.op, series.name, point.job.tokens, who, point.error);
  if (first_error_.empty()) first_error_ = text;
  screen_.context(text);
}

void QuickBench::measure_row(const Series& series, std::int64_t size, double run_seconds) {
  const std::int64_t samples = samples_for(run_seconds);
  Row row{&series, measure_ours(series, size, samples, lines_), std::nullopt};
  if (!row.ours.measured()) {
    note(series, row.ours, "ringattn");
  } else if (!peer_->version().empty()) {
    row.theirs = peer_->measure(row.ours, samples, last_);
    if (!row.theirs->measured()) note(series, *row.theirs, "PyTorch");
    lines_.write(*row.theirs, invocation_.arguments);
  }
  rows_.push_back(std::move(row));
}

void QuickBench::measure_series(const Series& series, double share) {
  const double end = seconds() + share;
  const std::int64_t first = series.sizes.front();
  double setup_of_token = 0.0;                               // seconds, mostly to generate the input
  double seconds_of_work = 0.0;                              // seconds of a run per unit of work()
  double peer_share = peer_->version().empty() ? 0.0 : 1.0;  // the peer's time divided by ours
  BenchLines none{JobOptions()};
  const auto tokens = [&](std::int64_t size) { return static_cast<double>(sequences(series, size) * size); };
  // Takes one sample, which also includes one-time costs of the first run, such as loading modules.
  const auto probe = [&](std::int64_t size) {
    const double begin = seconds();
    const BenchPoint point = measure_ours(series, size, 1, none);
    if (!point.measured()) {
      note(series, point, "ringattn");
      return false;
    }
    const double run = 1e-3 * point.ms.median;
    setup_of_token = std::max(0.0, seconds() - begin - 2.0 * run) / tokens(size);
    seconds_of_work = run / work(series, size);
    return true;
  };
  const auto fits = [&](std::int64_t size) {
    const double run = seconds_of_work * work(series, size);
    const double probed = series.all ? 0.0 : 2.0 * run + setup_of_token * tokens(size);
    return probed + setup_of_token * tokens(size) + (1.0 + peer_share) * sampling_seconds(run) <= end - seconds();
  };
  const auto measure = [&](std::int64_t size) { measure_row(series, size, seconds_of_work * work(series, size)); };

  if (!probe(first)) return;
  std::int64_t largest = first;
  for (const int size : std::span(series.sizes).subspan(1)) {
    if (size == 0 || !fits(size)) break;
    if (!series.all) {
      if (!probe(size)) break;
      largest = size;
      continue;
    }
    measure(size);
    const Row& row = rows_.back();
    if (!row.ours.measured()) return;
    largest = size;
    seconds_of_work = 1e-3 * row.ours.ms.median / work(series, size);
    if (row.theirs && row.theirs->measured()) peer_share = row.theirs->ms.median / row.ours.ms.median;
  }
  if (!series.all || largest == first) measure(largest);
}

Table QuickBench::table() const {
  const std::string peer = peer_->version().empty() ? "(no torch)" : "(rate)";
  const std::string peer_ms = peer_->version().empty() ? "(no torch)" : "(ms)";
  Table table({{"op"},
               {"job"},
               {"tokens"},
               {"seqs"},
               {"ringattn", "(ms)"},
               {"PyTorch", peer_ms},
               {"ringattn", "(rate)"},
               {"PyTorch", peer},
               {"rate"},
               {"ours/theirs", "(speed)"}});
  const bool tera = std::ranges::any_of(rows_, [](const Row& row) { return row.ours.tflops_per_rank >= 1.0; });
  for (const Row& row : rows_) {
    const BenchJob& job = row.ours.job;
    const bool step = job.kind == BenchKind::kStep;
    const auto rate = [&](const BenchPoint& point) {
      return fmt::format("{:.1f}", step ? point.gb_per_s : point.tflops_per_rank * (tera ? 1.0 : 1e3));
    };
    std::vector<std::string> cells(10, std::string(Table::kNoValue));
    cells[0] = job.op;
    cells[1] = row.series->name;
    cells[2] = fmt::format("{}", job.seq);
    cells[3] = fmt::format("{}", job.batch);
    cells[8] = step ? "GB/s" : tera ? "TFLOP/s" : "GFLOP/s";
    if (row.ours.measured()) {
      cells[4] = fmt::format("{:.3f}", row.ours.ms.median);
      cells[6] = rate(row.ours);
    }
    if (row.theirs && row.theirs->measured()) {
      cells[5] = fmt::format("{:.3f}", row.theirs->ms.median);
      cells[7] = rate(*row.theirs);
      cells[9] = fmt::format("{:.2f}", row.theirs->ms.median / row.ours.ms.median);
    }
    table.add(std::move(cells));
  }
  return table;
}

int QuickBench::run() {
  if (options_.dry_run) {
    for (const std::span<const Series> all : {std::span<const Series>(kOnGpu), std::span<const Series>(kOnCpu)}) {
      screen_.context(all.data() == kOnGpu ? "on a GPU, in sizes that there is time for:" : "on a CPU:");
      for (const Series& series : all) {
        for (const int size : series.sizes) {
          if (size > 0) screen_.context(fmt::format("  {}", fmt::join(invocation_of(series, size, 0).arguments, " ")));
        }
      }
    }
    screen_.context("dry run: nothing is measured");
    return 0;
  }
  const auto [on_gpu, threads] = find_device();
  peer_.emplace(on_gpu, threads, Deadline::after(kImportSeconds));
  const std::string version = version_line();
  screen_.context(std::string_view(version).substr(0, version.size() - 1));
  screen_.context(
      peer_->version().empty()
          ? fmt::format("PyTorch is not measured ({})", peer_->why_not())
          : fmt::format("each job by ringattn, then by PyTorch {}, with kernels that it chooses", peer_->version()));
  const std::span<const Series> all = on_gpu ? std::span<const Series>(kOnGpu) : std::span<const Series>(kOnCpu);
  double weights = 0.0;
  for (const Series& series : all) weights += weight(series);
  for (const Series& series : all) {
    if (seconds_left() <= 0.0 && &series != all.data()) {
      screen_.context(fmt::format("{}: not measured, the time is over", series.flags));
      continue;
    }
    measure_series(series, seconds_left() * weight(series) / weights);
    weights -= weight(series);
  }
  return finish();
}

int QuickBench::finish() {
  const bool any = std::ranges::any_of(rows_, [](const Row& row) { return row.ours.measured(); });
  if (!any) {
    fail(ErrorCode::kUnsupported, "no job of --quick can be measured", first_error_,
         "Choose a job that this machine has room for, by --seq and --heads.");
  }
  for (const Row& row : rows_) {
    if (row.ours.measured() && !row.ours.devices.empty()) {
      screen_.context(row.ours.devices.front());
      break;
    }
  }
  write_table(screen_, options_, table());
  screen_.context(fmt::format("took {:.0f} s", seconds()));
  std::vector<BenchPoint> points;
  std::vector<PointPair> pairs;
  for (const Row& row : rows_) {
    points.push_back(row.ours);
    if (!row.theirs) continue;
    points.push_back(*row.theirs);
    if (row.theirs->measured()) pairs.push_back({row.ours, *row.theirs});
  }
  write_bench_report(invocation_, points, pairs, std::nullopt, 0);
  return 0;
}

}  // namespace

int bench_quick(const Invocation& invocation, Transport& world, double seconds) {
  const Collective collective(world, Timeouts(invocation.config.options.timeout));
  collective.run_collectively([&] {
    check_flags(invocation.config, world.size());
    check_outputs(invocation);
  });
  return QuickBench(invocation, world, seconds).run();
}

}  // namespace ringattn
