// SPDX-License-Identifier: Apache-2.0
#include "launch/measure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "attention/attention.hpp"
#include "attention/synthetic.hpp"
#include "base/host.hpp"
#include "launch/execution.hpp"
#include "launch/job_input.hpp"
#include "launch/together.hpp"

namespace ringattn {

namespace {

constexpr double kFoldSeconds = 0.25;  // long enough to be measured
constexpr std::int64_t kFirstTokens = 1024;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 20;
constexpr std::size_t kLinkBytes = std::size_t{8} << 20;
constexpr int kLinkRounds = 6;
constexpr int kLatencyRounds = 50;

double slowest(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

// Seconds for `rounds` exchanges of `bytes` with both neighbours; the best round counts, for others' noise only adds.
double best_round(Transport& world, std::size_t bytes, int rounds, double timeout) {
  std::vector<std::byte> out(bytes), in(bytes);
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  double best = INFINITY;
  for (int round = 0; round < rounds; ++round) {
    Exchange exchange;
    exchange.label = "measurement";
    exchange.sends.push_back({next, 0, {{out.data(), bytes}}});
    exchange.receives.push_back({previous, 0, {{in.data(), bytes}}});
    world.barrier(Deadline::after(timeout));
    const auto start = std::chrono::steady_clock::now();
    world.wait(world.post(std::move(exchange), {}), {}, Deadline::after(timeout));
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// Operations per second of this rank's folds in a causal job of `tokens` a rank, with the seconds they took.
struct FoldRate {
  double seconds = 0.0;
  double flops_per_second = 0.0;
};

FoldRate fold_rate(const Config& config, Transport& world, std::int64_t tokens) {
  Job job;
  job.spec.heads = 8;
  job.spec.kv_heads = 2;
  job.spec.softmax_scale = 0.088F;
  job.sequences = uniform_sequences(1, tokens * world.size(), tokens * world.size());
  Config without_model = config;  // --machine names what is written here
  without_model.options.machine.clear();
  const Options options = library_options(without_model, job);
  Attention attention(job, world, options);
  const JobInput input = JobInput::synthetic(job, 1, attention.options().threads);
  const RankResult result = execute_job(input, attention, world, options.timeout_seconds);
  FoldRate rate;
  for (const BlockTimes& block : result.stats.blocks) rate.seconds += block.fold_end - block.fold_begin;
  rate.flops_per_second = rate.seconds > 0.0 ? attention.plan().flops() / rate.seconds : 0.0;
  return rate;
}

}  // namespace

MachineModel measure_machine(const Config& config, Transport& world) {
  const double timeout = config.options.timeout;
  MachineModel machine;
  machine.name =
      fmt::format("{}, {} rank{}, {}", cpu_model(), world.size(), world.size() == 1 ? "" : "s", world.name());

  for (std::int64_t tokens = kFirstTokens; tokens <= kMostTokens; tokens *= 2) {
    const std::vector<FoldRate> rates = gather_values(world, fold_rate(config, world, tokens), timeout);
    std::vector<double> seconds_per_flop;
    double longest = 0.0;
    for (const FoldRate& rate : rates) {
      longest = std::max(longest, rate.seconds);
      if (rate.flops_per_second > 0.0) seconds_per_flop.push_back(1.0 / rate.flops_per_second);
    }
    if (!seconds_per_flop.empty()) machine.flops_per_second = 1.0 / slowest(seconds_per_flop);
    if (longest >= kFoldSeconds) break;
  }
  if (world.size() == 1) return machine;
  const double small = slowest(gather_values(world, best_round(world, 8, kLatencyRounds, timeout), timeout));
  const double large = slowest(gather_values(world, best_round(world, kLinkBytes, kLinkRounds, timeout), timeout));
  machine.latency_seconds = small;
  machine.link_bytes_per_second = static_cast<double>(kLinkBytes) / std::max(large - small, large / 2);
  return machine;
}

}  // namespace ringattn
