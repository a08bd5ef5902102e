// SPDX-License-Identifier: Apache-2.0
// Decoding steps of a sweep.
#include <memory>

#include "launch/bench_sweep.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/progress.hpp"
#include "ops/decode/loaded_decode.hpp"

namespace ringattn {

void Sweep::measure_decode(const Setting& setting) {
  ProgressDisplay progress(options_, world_.rank() == 0);
  PreparedFileJob prepared(setting.input(), world_, library(setting));
  Decode& decode = prepared.decode();
  Report report = report_of(prepared);
  if (points_.empty()) print_job(screen_, prepared, report);

  const DecodeSample sample = decode_sample(decode.backend().memory(), prepared.step().memory.cache);
  const auto step = [&](std::string_view what, const StepCount& steps) { progress.update(what, steps); };
  const std::unique_ptr<LoadedDecode> loaded = prepared.load_decode(step, sample.caches);
  const Samples samples = sample_decode(collective_, {options_.samples, step}, *loaded, sample);
  progress.clear();

  const RankResult result = loaded->fetch({});
  gather_figures(report, prepared, result, world_, collective_);
  BenchPoint point = point_of(setting, report, samples);
  point.gb_per_s = samples.ms.per_second(prepared.step().bytes_read) * 1e-9;
  point.digest = digest_result(setting.input(), result, collective_).out;
  keep(point);
}

}  // namespace ringattn
