// SPDX-License-Identifier: Apache-2.0
// Scans of a sweep.
#include "attention/tokens/cost.hpp"
#include "launch/bench_sweep.hpp"
#include "launch/progress.hpp"
#include "launch/ssm_request.hpp"
#include "ops/ssm/loaded_ssm.hpp"

namespace ringattn {

void Sweep::measure_ssm(const Setting& setting) {
  ProgressDisplay progress(options_, world_.rank() == 0);
  PreparedSsm prepared(setting.ssm(), world_, ssm_options(invocation_.config));
  Report report = report_of(prepared);
  if (points_.empty()) print_ssm(screen_, prepared, report);
  const auto step = [&](std::string_view what, const StepCount& steps) { progress.update(what, steps); };
  LoadedSsm loaded(setting.ssm(), prepared.ssm(), collective_, step);
  SsmStats last;
  const Samples samples = sample_ssm(collective_, {options_.samples, step}, loaded, last);
  progress.clear();

  const SsmRankResult result = loaded.fetch(last);
  gather_ssm_figures(report, prepared, result, world_, collective_);
  BenchPoint point = point_of(setting, report, samples);
  const SsmJob& job = setting.ssm().job();
  const double bytes = static_cast<double>(job.tokens()) * static_cast<double>(ssm_token_bytes(job));
  point.gb_per_s = samples.ms.per_second(bytes) * 1e-9;
  point.digest = digest_ssm(setting.ssm(), result, collective_).y;
  keep(point);
}

}  // namespace ringattn
