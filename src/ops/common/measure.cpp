// SPDX-License-Identifier: Apache-2.0
#include "ops/common/measure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "base/host.hpp"
#include "ops/common/loaded_job.hpp"

namespace ringattn {

namespace {

constexpr double kComputeSeconds = 0.25;  // long enough to be measured
constexpr std::int64_t kFirstTokens = 1024;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 20;
constexpr std::size_t kLinkBytes = std::size_t{8} << 20;
constexpr int kLinkRounds = 6;
constexpr int kLatencyRounds = 50;

double slowest(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

// Seconds for `rounds` exchanges of `bytes` with both neighbours; the best round counts, for others' noise only adds.
double best_round(Transport& world, Backend& backend, std::size_t bytes, int rounds, const Collective& collective) {
  const Buffer out = backend.allocate(bytes);
  const Buffer in = backend.allocate(bytes);
  const Stream stream = backend.stream();
  const auto marks = backend.make_events(2, true);
  const Progress progress = [&world] { world.progress(); };
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  double best = INFINITY;
  for (int round = 0; round < rounds; ++round) {
    Exchange exchange;
    exchange.label = "measurement";
    exchange.sends.push_back({next, 0, {{out.data(), bytes}}});
    exchange.receives.push_back({previous, 0, {{in.data(), bytes}}});
    collective.barrier();
    marks->record(0, stream);
    world.wait(world.post(std::move(exchange), stream), stream, collective.timeouts().for_peer());
    marks->record(1, stream);
    marks->synchronize(1, collective.timeouts().for_peer(), progress);
    best = std::min(best, marks->elapsed(0, 1));
  }
  return best;
}

// A causal job of `tokens` a rank, to be measured with.
std::unique_ptr<Attention> measured_job(const Options& options, Transport& world, std::int64_t tokens) {
  Job job;
  job.spec.heads = 8;
  job.spec.kv_heads = 2;
  job.spec.softmax_scale = 0.088F;
  job.batch = uniform_batch(1, tokens * world.size(), tokens * world.size());
  return std::make_unique<Attention>(job, world, options);
}

// FLOPs per second of this rank's kernels, and their time in seconds. The second of two runs, warmed up.
struct AttentionRate {
  double seconds = 0.0;
  double flops_per_second = 0.0;
};

AttentionRate attention_rate(Attention& attention, const Collective& collective) {
  const JobInput input = JobInput::synthetic(attention.job(), 1);
  LoadedJob loaded(input, attention, collective);
  loaded.run();
  const RankResult result = loaded.fetch(loaded.run());
  AttentionRate rate;
  for (const BlockTimes& block : result.stats.blocks) rate.seconds += block.compute_end - block.compute_begin;
  rate.flops_per_second = rate.seconds > 0.0 ? attention.plan().flops() / rate.seconds : 0.0;
  return rate;
}

}  // namespace

MachineModel measure_machine(const Options& options, Transport& world) {
  const Collective collective(world, Timeouts(options.timeout_seconds));
  std::unique_ptr<Attention> attention;
  double flops_per_second = 0.0;
  for (std::int64_t tokens = kFirstTokens; tokens <= kMaxTokens; tokens *= 2) {
    attention = measured_job(options, world, tokens);
    const std::vector<AttentionRate> rates = collective.gather_values(attention_rate(*attention, collective));
    std::vector<double> seconds_per_flop;
    double longest = 0.0;
    for (const AttentionRate& rate : rates) {
      longest = std::max(longest, rate.seconds);
      if (rate.flops_per_second > 0.0) seconds_per_flop.push_back(1.0 / rate.flops_per_second);
    }
    if (!seconds_per_flop.empty()) flops_per_second = 1.0 / slowest(seconds_per_flop);
    if (longest >= kComputeSeconds) break;
  }
  MachineModel machine = attention->options().machine;  // for what can't be measured, the kernel's defaults
  if (flops_per_second > 0.0) machine.flops_per_second = flops_per_second;
  const std::string device =
      attention->backend().memory() == MemoryKind::kDevice ? attention->backend().identity() : cpu_model();
  machine.name = fmt::format("{}, {} rank{}, {}", device, world.size(), world.size() == 1 ? "" : "s", world.name());
  if (world.size() == 1) return machine;
  const auto slowest_round = [&](std::size_t bytes, int rounds) {
    return slowest(collective.gather_values(best_round(world, attention->backend(), bytes, rounds, collective)));
  };
  const double small = slowest_round(8, kLatencyRounds);
  const double large = slowest_round(kLinkBytes, kLinkRounds);
  machine.latency_seconds = small;
  machine.link_bytes_per_second = static_cast<double>(kLinkBytes) / std::max(large - small, large / 2);
  return machine;
}

}  // namespace ringattn
