// SPDX-License-Identifier: Apache-2.0
#include "ops/jobs/samples.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <string_view>

namespace ringattn {

namespace {

constexpr double kShortSeconds = 0.1;  // shorter runs have more than one warm-up run

constexpr std::size_t kFarBeyondCache = std::size_t{512} << 20;  // bytes between two uses of a cache
constexpr int kMaxCaches = 256;
constexpr int kMinSteps = 4;  // of a graph

}  // namespace

SampleTimes summarise(std::vector<double> milliseconds) {
  if (milliseconds.empty()) return {};
  std::sort(milliseconds.begin(), milliseconds.end());
  const auto quantile = [&](double part) {
    const double at = part * static_cast<double>(milliseconds.size() - 1);
    const auto low = static_cast<std::size_t>(at);
    const std::size_t high = std::min(low + 1, milliseconds.size() - 1);
    return milliseconds[low] + (milliseconds[high] - milliseconds[low]) * (at - static_cast<double>(low));
  };
  return {quantile(0.5), quantile(0.1), quantile(0.9)};
}

std::vector<double> slowest(const Collective& collective, const std::vector<double>& mine) {
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(double));
  std::vector<double> most(mine.size(), 0.0);
  for (const std::string& theirs : collective.gather(bytes)) {
    for (std::size_t i = 0; i < most.size(); ++i) {
      double value = 0.0;
      std::memcpy(&value, theirs.data() + i * sizeof value, sizeof value);
      most[i] = std::max(most[i], value);
    }
  }
  return most;
}

std::int64_t sample_count(const SampleRequest& request, double seconds) {
  constexpr std::int64_t kLeast = 10;
  constexpr std::int64_t kMost = 10000;
  constexpr double kMinSeconds = 0.5;  // of all samples
  if (request.count > 0) return request.count;
  const double wanted = std::ceil(kMinSeconds / std::max(seconds, 1e-9));
  return std::max(kLeast, static_cast<std::int64_t>(std::min(wanted, static_cast<double>(kMost))));
}

std::vector<Samples> take_samples(const Collective& collective, const SampleRequest& request, double seconds,
                                  std::size_t kinds, const std::function<RunTimes(std::size_t kind)>& run) {
  const std::int64_t count = sample_count(request, slowest(collective, {seconds}).front());
  const auto done = [&](std::int64_t samples) {
    if (request.on_progress) request.on_progress("sample", {samples, count});
  };
  struct Mine {
    std::vector<double> milliseconds;
    std::vector<double> waited;
  };
  std::vector<Mine> mine(kinds);
  done(0);
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::size_t kind = 0; kind < kinds; ++kind) {
      const RunTimes times = run(kind);
      mine[kind].milliseconds.push_back(times.seconds * 1e3);
      mine[kind].waited.push_back(times.exposed_comm_seconds * 1e3);
    }
    done(i + 1);
  }
  std::vector<Samples> samples;
  for (const Mine& of : mine) {
    const SampleTimes ms = summarise(slowest(collective, of.milliseconds));
    samples.push_back({count, ms, summarise(slowest(collective, of.waited)).median});
  }
  return samples;
}

// Runs until caches, clocks and allocations are stable. The first run is a whole one, so that compute-only runs find
// the contents of every block.
std::vector<Samples> sample_runs(const Collective& collective, const SampleRequest& request,
                                 const std::function<RunStats(RunMode)>& run, std::span<const RunMode> modes) {
  double seconds = run(RunMode::kWhole).seconds;
  if (slowest(collective, {seconds}).front() < kShortSeconds) {
    for (int i = 0; i < 2; ++i) {
      for (const RunMode mode : modes) seconds = run(mode).seconds;
    }
  }
  return take_samples(collective, request, seconds, modes.size(), [&](std::size_t kind) {
    const RunStats stats = run(modes[kind]);
    return RunTimes{stats.seconds, stats.exposed_comm_seconds};
  });
}

Samples sample_ssm(const Collective& collective, const SampleRequest& request, const std::function<SsmStats()>& run,
                   SsmStats& last) {
  for (int i = 0; i < 2; ++i) last = run();
  return take_samples(collective, request, last.seconds, 1,
                      [&](std::size_t) {
                        last = run();
                        return RunTimes{last.seconds, last.exposed_comm_seconds};
                      })
      .front();
}

DecodeSample decode_sample(MemoryKind memory, std::size_t cache_bytes) {
  if (memory != MemoryKind::kDevice) return {};
  const std::size_t caches = kFarBeyondCache / std::max<std::size_t>(1, cache_bytes);
  DecodeSample sample;
  sample.caches = static_cast<int>(std::clamp<std::size_t>(caches, 1, kMaxCaches));
  sample.steps = std::max(sample.caches, kMinSteps);
  return sample;
}

Samples sample_decode(const Collective& collective, const SampleRequest& request, LoadedDecode& loaded,
                      const DecodeSample& sample) {
  double seconds = 0.0;
  for (int i = 0; i < 3; ++i) seconds = loaded.run_many(sample.steps);
  return take_samples(collective, request, seconds * sample.steps, 1,
                      [&](std::size_t) { return RunTimes{loaded.run_many(sample.steps)}; })
      .front();
}

}  // namespace ringattn
