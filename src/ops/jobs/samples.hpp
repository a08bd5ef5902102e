// SPDX-License-Identifier: Apache-2.0
// Measures the time of loaded jobs: warm-up, then samples until the figures are stable. The slowest rank counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/collective.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/decode/loaded_decode.hpp"
#include "ops/ssm/loaded_ssm.hpp"

namespace ringattn {

// Milliseconds. Quantiles are interpolated linearly between the two nearest samples.
struct SampleTimes {
  double median = 0.0;
  double p10 = 0.0;
  double p90 = 0.0;

  // The rate, by the median, of runs that do `amount` of work each, per second. 0 if nothing was measured.
  double per_second(double amount) const { return median > 0.0 ? amount / median * 1e3 : 0.0; }
};
SampleTimes summarise(std::vector<double> milliseconds);

struct SampleRequest {
  std::int64_t count = 0;             // 0: enough for stable figures
  ProgressCallback on_progress = {};  // of all "sample"s
};

struct Samples {
  std::int64_t count = 0;
  SampleTimes ms;                // of the slowest rank in each
  double exposed_comm_ms = 0.0;  // median over the samples of the rank that waited longest
};

// Times of one run on this rank.
struct RunTimes {
  double seconds = 0.0;
  double exposed_comm_seconds = 0.0;
};

// The maximum over all ranks of each value. Collective, as are all functions below.
std::vector<double> slowest(const Collective& collective, const std::vector<double>& mine);

// The requested number of samples or, without one, at least ten and half a second. `seconds`: duration of one sample.
std::int64_t sample_count(const SampleRequest& request, double seconds);

// Takes samples of each of `kinds` kinds of runs; `run` does one. The kinds take turns, so that all see the machine in
// the same state. `seconds`: duration of a run on this rank after the warm-up.
std::vector<Samples> take_samples(const Collective& collective, const SampleRequest& request, double seconds,
                                  std::size_t kinds, const std::function<RunTimes(std::size_t kind)>& run);

// Takes samples of each mode. `run` does one run of a loaded job.
std::vector<Samples> sample_runs(const Collective& collective, const SampleRequest& request,
                                 const std::function<RunStats(RunMode)>& run, std::span<const RunMode> modes);

// `last`: receives the statistics of the last run.
Samples sample_ssm(const Collective& collective, const SampleRequest& request, const std::function<SsmStats()>& run,
                   SsmStats& last);

// Decode: a sample is `steps` consecutive steps over `caches` copies of the cache. On a device there are enough copies
// that no step finds its keys in L2, as between the layers of a model. Hosts take one step over one cache.
struct DecodeSample {
  int caches = 1;
  int steps = 1;
};
DecodeSample decode_sample(MemoryKind memory, std::size_t cache_bytes);

// `loaded` has the number of caches of `sample`. Times are those of one step.
Samples sample_decode(const Collective& collective, const SampleRequest& request, LoadedDecode& loaded,
                      const DecodeSample& sample);

}  // namespace ringattn
