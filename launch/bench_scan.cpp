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
  const auto step = [&](std::string_view what, const StepCount& steps) { progress.update(what, steps); };
  LoadedScan loaded(setting.scan(), prepared.scan(), meeting_, step);
  ScanStats last;
  const Samples samples = sample_scans(meeting_, {options_.samples, step}, loaded, last);
  progress.clear();

  const ScanRankResult result = loaded.fetch(last);
  gather_scan_figures(report, prepared, result, world_, meeting_);
  BenchPoint point = point_of(setting, report, samples);
  const ScanJob& job = setting.scan().job();
  const double bytes = static_cast<double>(job.tokens()) * static_cast<double>(scan_token_bytes(job));
  point.gb_per_s = samples.ms.per_second(bytes) * 1e-9;
  point.digest = digest_scan(setting.scan(), result, meeting_).y;
  keep(point);
}

}  // namespace ringattn
