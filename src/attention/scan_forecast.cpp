// SPDX-License-Identifier: Apache-2.0
#include "attention/scan_forecast.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/state_exchange.hpp"
#include "attention/tokens/cost.hpp"
#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

std::vector<ScanRun> scan_runs(const Layout& layout, const ScanHops& hops, int rank) {
  std::vector<ScanRun> all;
  const std::span<const TokenRun> tokens = layout.runs(rank);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    ScanRun run;
    run.begin = tokens[i].begin;
    run.tokens = tokens[i].tokens();
    run.row = layout.run_rows(rank)[i];
    run.step = hops.steps[static_cast<std::size_t>(rank)][i];
    all.push_back(run);
  }
  return all;
}

const ScanMemory& ScanForecast::most_memory() const {
  return *std::ranges::max_element(memory, {}, [](const ScanMemory& bytes) { return bytes.total(); });
}

std::int64_t ScanForecast::states_moved() const {
  std::int64_t states = 0;
  for (const std::vector<StateHop>& step : hops.hops) states += static_cast<std::int64_t>(step.size());
  return states;
}

double ScanForecast::balance() const {
  std::int64_t sum = 0;
  std::int64_t most = 0;
  for (int rank = 0; rank < layout.world(); ++rank) {
    sum += layout.tokens(rank);
    most = std::max(most, layout.tokens(rank));
  }
  return sum > 0 ? static_cast<double>(most) / static_cast<double>(sum) * layout.world() : 1.0;
}

double passing_seconds(const ScanJob& job, const ScanForecast& forecast, const MachineModel& machine) {
  const double heads = static_cast<double>(forecast.ranges.front().count) / job.spec.heads;
  const double push = heads * static_cast<double>(carried_bytes(job)) / machine.link_bytes_per_second;
  return static_cast<double>(forecast.hops.hops.size()) * (machine.latency_seconds + push);
}

std::vector<HeadRange> head_ranges(int heads, const ScanKernel& kernel, int ranges) {
  const int together = kernel.heads_together();
  const int half = (heads / together + 1) / 2 * together;
  if (ranges == 1 || half >= heads) return {{0, heads}};
  return {{0, half}, {half, heads - half}};
}

void check_budget(const ScanMemory& needed, std::size_t budget) {
  if (budget == 0 || needed.total() <= budget) return;
  fail(ErrorCode::kMemory, fmt::format("a memory budget of {} a rank is too small", counted(budget, "byte")),
       fmt::format("{} are needed: {} of rows, {} of states, {} of scratch, {} of states that travel", needed.total(),
                   needed.rows, needed.states, needed.scratch, needed.exchange),
       "Use more ranks, or allow for fewer tokens.");
}

void check_scan_budget(const ScanJob& job, int world, std::size_t budget) {
  const std::int64_t bytes = job.alone ? scan_token_bytes(job) : scan_token_bytes(job.spec);
  const double least = static_cast<double>(job.tokens()) * static_cast<double>(bytes) / world;
  if (budget == 0 || least <= static_cast<double>(budget)) return;
  fail(ErrorCode::kMemory, fmt::format("a memory budget of {} a rank is too small", counted(budget, "byte")),
       fmt::format("the rank with most rows has at least {:.0f} bytes of them", least),
       "Use more ranks, or allow for fewer tokens.");
}

ScanForecast forecast_scan(const ScanJob& job, const std::optional<std::vector<std::vector<TokenRun>>>& runs, int world,
                           const ScanKernel* kernel, const MachineModel& machine, double convolution_rate) {
  Layout layout = scan_layout(job.lengths, runs, world);
  ScanHops hops = scan_hops(layout);
  ScanForecast forecast{std::move(layout), std::move(hops), {}, 0.0, {{0, job.spec.heads}}};
  const std::size_t kinds = job.alone ? (job.initial_halos ? 1 : 0) + (job.final_halos ? 1 : 0)
                                      : (job.initial_states ? 1 : 0) + (job.final_states ? 1 : 0);
  std::vector<std::size_t> empty(static_cast<std::size_t>(world));  // sequences without tokens, by rank
  const StateOwners owners = state_owners(forecast.layout);
  for (std::size_t s = 0; s < job.lengths.size(); ++s) {
    if (job.lengths[s] == 0) ++empty[static_cast<std::size_t>(owners.final[s])];
  }
  std::int64_t most_tokens = 0;
  for (int rank = 0; rank < world; ++rank) {
    const std::vector<ScanRun> own = scan_runs(forecast.layout, forecast.hops, rank);
    const std::int64_t tokens = forecast.layout.tokens(rank);
    ScanMemory bytes;
    bytes.states =
        (own.size() + empty[static_cast<std::size_t>(rank)]) * kinds * static_cast<std::size_t>(carried_bytes(job));
    if (job.alone) {
      bytes.rows = static_cast<std::size_t>(tokens * scan_token_bytes(job));
      bytes.exchange = own.size() * static_cast<std::size_t>(carried_bytes(job));
    } else {
      bytes.rows = static_cast<std::size_t>(tokens * scan_token_bytes(job.spec));
      if (!job.update) bytes.scratch = kernel->scratch_bytes(limits_of(own));
      if (job.convolution) bytes.scratch += static_cast<std::size_t>(tokens * convolution_row_bytes(*job.convolution));
      bytes.exchange = StateExchange::bytes(job.spec, forecast.hops, rank);
    }
    forecast.memory.push_back(bytes);
    most_tokens = std::max(most_tokens, tokens);
  }
  const double flops = job.alone ? scan_token_flops(job) : scan_token_flops(job.spec);
  forecast.seconds = flops * static_cast<double>(most_tokens) / machine.flops_per_second;
  if (!job.alone && !forecast.hops.hops.empty() &&
      passing_seconds(job, forecast, machine) > kernel->cost_of_two_ranges(forecast.seconds)) {
    forecast.ranges = head_ranges(job.spec.heads, *kernel, 2);
  }
  if (!job.alone && job.convolution) {
    forecast.seconds += convolution_token_flops(*job.convolution) * static_cast<double>(most_tokens) / convolution_rate;
  }
  return forecast;
}

}  // namespace ringattn
