// SPDX-License-Identifier: Apache-2.0
// How long jobs take that lie in memory: warm-up, then samples until the figure stands; the slowest rank counts.
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

// Milliseconds; the quantiles lie linearly between the two nearest samples.
struct SampleTimes {
  double median = 0.0;
  double p10 = 0.0;
  double p90 = 0.0;

  // How much of what a run has `amount` of is done in a second, by the median. 0 where nothing was measured.
  double per_second(double amount) const { return median > 0.0 ? amount / median * 1e3 : 0.0; }
};
SampleTimes summarise(std::vector<double> milliseconds);

struct SampleRequest {
  std::int64_t count = 0;             // 0: enough for the figure
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

// For each value, its maximum over all ranks. Collective, as are all functions below.
std::vector<double> slowest(const Collective& collective, const std::vector<double>& mine);

// As many samples as are asked for, else at least ten, and half a second of them. `seconds`: of one.
std::int64_t sample_count(const SampleRequest& request, double seconds);

// Samples of each of `kinds` kinds of runs: `run` does one. They take turns, so all see the machine in the same state.
// `seconds`: what a run took on this rank when it was warm.
std::vector<Samples> take_samples(const Collective& collective, const SampleRequest& request, double seconds,
                                  std::size_t kinds, const std::function<RunTimes(std::size_t kind)>& run);

// Samples of each mode. `run` does one run of a loaded job.
std::vector<Samples> sample_runs(const Collective& collective, const SampleRequest& request,
                                 const std::function<RunStats(RunMode)>& run, std::span<const RunMode> modes);

// `last`: of the last run.
Samples sample_ssm(const Collective& collective, const SampleRequest& request, const std::function<SsmStats()>& run,
                   SsmStats& last);

// Decode: a sample is `steps` consecutive steps over `caches` copies of the cache. On a device there are enough copies
// that no step finds its keys in L2, as between the layers of a model. Hosts take one step of one cache.
struct DecodeSample {
  int caches = 1;
  int steps = 1;
};
DecodeSample decode_sample(MemoryKind memory, std::size_t cache_bytes);

// `loaded` has the caches that `sample` says. The times are those of one step.
Samples sample_decode(const Collective& collective, const SampleRequest& request, LoadedDecode& loaded,
                      const DecodeSample& sample);

}  // namespace ringattn
