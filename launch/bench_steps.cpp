// SPDX-License-Identifier: Apache-2.0
// Decoding steps of a sweep. On a GPU a sample is a graph of steps whose caches lie in no cache memory any more, as
// they do not between the layers of a model.
#include <algorithm>
#include <memory>

#include "attention/job/loaded_step.hpp"
#include "launch/bench_sweep.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/progress.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kFarBeyondCache = std::size_t{512} << 20;  // bytes between two uses of a cache
constexpr int kMostCaches = 256;
constexpr int kLeastSteps = 4;  // of a graph

}  // namespace

void Sweep::measure_step(const Setting& setting) {
  ProgressDisplay progress(options_, world_.rank() == 0);
  PreparedFileJob prepared(setting.input(), world_, library(setting));
  Decode& decode = prepared.decode();
  Report report = report_of(prepared);
  if (points_.empty()) print_job(screen_, prepared, report);

  const bool device = decode.backend().memory() == MemoryKind::kDevice;
  const std::size_t bytes = std::max<std::size_t>(1, prepared.step().memory.cache);
  const int caches = device ? static_cast<int>(std::clamp<std::size_t>(kFarBeyondCache / bytes, 1, kMostCaches)) : 1;
  const int steps = device ? std::max(caches, kLeastSteps) : 1;
  const std::unique_ptr<LoadedStep> step = prepared.load_step(
      [&](std::string_view what, std::int64_t done, std::int64_t all) { progress.update(what, done, all); }, caches);
  LoadedStep& loaded = *step;
  double seconds = 0.0;
  for (int i = 0; i < 3; ++i) seconds = loaded.run_many(steps);  // warm-up
  const std::int64_t count = sample_count(slowest(meeting_, {seconds * steps}).front());
  std::vector<double> milliseconds;
  progress.update("sample", 0, count);
  for (std::int64_t i = 0; i < count; ++i) {
    milliseconds.push_back(loaded.run_many(steps) * 1e3);
    progress.update("sample", i + 1, count);
  }
  progress.clear();

  const RankResult result = loaded.fetch({});
  gather_figures(report, prepared, result, world_, meeting_);
  BenchPoint point = point_of(setting, report);
  point.samples = count;
  point.ms = summarise(slowest(meeting_, milliseconds));
  if (point.ms.median > 0.0) {
    point.tflops_per_rank = report.flops / point.ms.median / world_.size() * 1e-9;
    point.gb_per_s = prepared.step().bytes_read / point.ms.median * 1e-6;
  }
  point.digest = digest_result(setting.input(), result, meeting_).out;
  keep(point);
}

}  // namespace ringattn
