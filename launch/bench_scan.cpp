// SPDX-License-Identifier: Apache-2.0
// Scans of a sweep.
#include "attention/job/loaded_scan.hpp"
#include "attention/tokens/cost.hpp"
#include "launch/bench_sweep.hpp"
#include "launch/progress.hpp"
#include "launch/scan_request.hpp"

namespace ringattn {

void Sweep::measure_scan(const Setting& setting) {
  ProgressDisplay progress(options_, world_.rank() == 0);
  PreparedScan prepared(setting.scan(), world_, scan_options(invocation_.config));
  Report report = report_of(prepared);
  if (points_.empty()) print_scan(screen_, prepared, report);
  LoadedScan loaded(
      setting.scan(), prepared.scan(), meeting_,
      [&](std::string_view what, std::int64_t done, std::int64_t all) { progress.update(what, done, all); });
  ScanStats stats;
  for (int i = 0; i < 2; ++i) stats = loaded.run();  // warm-up
  const std::int64_t count = sample_count(slowest(meeting_, {stats.seconds}).front());
  std::vector<double> milliseconds;
  std::vector<double> waiting;
  progress.update("sample", 0, count);
  for (std::int64_t i = 0; i < count; ++i) {
    stats = loaded.run();
    milliseconds.push_back(stats.seconds * 1e3);
    waiting.push_back(stats.waiting_seconds * 1e3);
    progress.update("sample", i + 1, count);
  }
  progress.clear();

  const ScanRankResult result = loaded.fetch(stats);
  gather_scan_figures(report, prepared, result, world_, meeting_);
  BenchPoint point = point_of(setting, report);
  point.samples = count;
  point.ms = summarise(slowest(meeting_, milliseconds));
  point.exposed_ms = summarise(slowest(meeting_, waiting)).median;
  if (point.ms.median > 0.0) {
    const ScanJob& job = setting.scan().job();
    const double bytes = static_cast<double>(job.tokens()) * static_cast<double>(scan_token_bytes(job));
    point.tflops_per_rank = report.flops / point.ms.median / world_.size() * 1e-9;
    point.gb_per_s = bytes / point.ms.median * 1e-6;
  }
  point.digest = digest_scan(setting.scan(), result, meeting_).y;
  keep(point);
}

}  // namespace ringattn
