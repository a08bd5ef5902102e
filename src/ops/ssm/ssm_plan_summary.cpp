// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm_plan_summary.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/tokens/cost.hpp"
#include "base/error.hpp"
#include "base/size.hpp"
#include "ops/ssm/state_exchange.hpp"

namespace ringattn {

std::vector<SsmRun> ssm_runs(const Layout& layout, const StateHops& hops, int rank) {
  std::vector<SsmRun> all;
  const std::span<const TokenRun> tokens = layout.runs(rank);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    SsmRun run;
    run.begin = tokens[i].begin;
    run.tokens = tokens[i].tokens();
    run.row = layout.run_rows(rank)[i];
    run.step = hops.steps[static_cast<std::size_t>(rank)][i];
    all.push_back(run);
  }
  return all;
}

const SsmMemory& SsmPlanSummary::max_memory() const {
  return *std::ranges::max_element(memory, {}, [](const SsmMemory& bytes) { return bytes.total(); });
}

std::int64_t SsmPlanSummary::states_moved() const {
  std::int64_t states = 0;
  for (const std::vector<StateHop>& step : hops.hops) states += static_cast<std::int64_t>(step.size());
  return states;
}

double SsmPlanSummary::balance() const {
  std::int64_t sum = 0;
  std::int64_t max_tokens = 0;
  for (int rank = 0; rank < layout.world(); ++rank) {
    sum += layout.tokens(rank);
    max_tokens = std::max(max_tokens, layout.tokens(rank));
  }
  return sum > 0 ? static_cast<double>(max_tokens) / static_cast<double>(sum) * layout.world() : 1.0;
}

double passing_seconds(const SsmJob& job, const SsmPlanSummary& summary, const MachineModel& machine) {
  return passing_seconds(job.spec.heads, carried_bytes(job), summary, machine);
}

double passing_seconds(int heads, std::int64_t state_bytes, const SsmPlanSummary& summary,
                       const MachineModel& machine) {
  const double part = static_cast<double>(summary.ranges.front().count) / heads;
  const double send = part * static_cast<double>(state_bytes) / machine.link_bytes_per_second;
  return static_cast<double>(summary.hops.hops.size()) * (machine.latency_seconds + send);
}

std::vector<HeadRange> head_ranges(int heads, const SsmKernel& kernel, int ranges) {
  return head_ranges(heads, kernel.heads_together(), ranges);
}

std::vector<HeadRange> head_ranges(int heads, int granule, int ranges) {
  const int half = (heads / granule + 1) / 2 * granule;
  if (ranges == 1 || half >= heads) return {{0, heads}};
  return {{0, half}, {half, heads - half}};
}

void check_budget(const SsmMemory& needed, std::size_t budget) {
  if (budget == 0 || needed.total() <= budget) return;
  fail(ErrorCode::kMemory, fmt::format("a memory budget of {} a rank is too small", counted(budget, "byte")),
       fmt::format("{} bytes are needed: {} for rows, {} for states, {} for scratch, {} for states that are exchanged",
                   needed.total(), needed.rows, needed.states, needed.scratch, needed.exchange),
       "Use more ranks or fewer tokens.");
}

void check_ssm_budget(const SsmJob& job, int world, std::size_t budget) {
  const std::int64_t bytes = job.conv1d_only ? ssm_token_bytes(job) : ssm_token_bytes(job.spec);
  const double min_bytes = static_cast<double>(job.tokens()) * static_cast<double>(bytes) / world;
  if (budget == 0 || min_bytes <= static_cast<double>(budget)) return;
  fail(ErrorCode::kMemory, fmt::format("a memory budget of {} a rank is too small", counted(budget, "byte")),
       fmt::format("one rank needs at least {:.0f} bytes for its rows", min_bytes), "Use more ranks or fewer tokens.");
}

SsmPlanSummary summarize_ssm_plan(const SsmJob& job, const std::optional<std::vector<std::vector<TokenRun>>>& runs,
                                  int world, const SsmKernel* kernel, const MachineModel& machine, double conv1d_rate,
                                  const RateOfTokens& rate) {
  Layout layout = ssm_layout(job.lengths, runs, world, scan_unit(job));
  StateHops hops = state_hops(layout);
  SsmPlanSummary summary{std::move(layout), std::move(hops), {}, 0.0, {{0, job.spec.heads}}};
  // Initial and final states, or halos, that the caller passes for each sequence: 0, 1 or 2.
  const std::size_t state_tensors = job.conv1d_only ? (job.initial_halos ? 1 : 0) + (job.final_halos ? 1 : 0)
                                                    : (job.initial_states ? 1 : 0) + (job.final_states ? 1 : 0);
  std::vector<std::size_t> empty(static_cast<std::size_t>(world));  // [ranks] number of empty sequences it owns
  const StateOwners owners = state_owners(summary.layout);
  for (std::size_t s = 0; s < job.lengths.size(); ++s) {
    if (job.lengths[s] == 0) ++empty[static_cast<std::size_t>(owners.final[s])];
  }
  std::int64_t max_tokens = 0;
  for (int rank = 0; rank < world; ++rank) {
    const std::vector<SsmRun> own = ssm_runs(summary.layout, summary.hops, rank);
    const std::int64_t tokens = summary.layout.tokens(rank);
    SsmMemory bytes;
    bytes.states = (own.size() + empty[static_cast<std::size_t>(rank)]) * state_tensors *
                   static_cast<std::size_t>(carried_bytes(job));
    if (job.conv1d_only) {
      bytes.rows = static_cast<std::size_t>(tokens * ssm_token_bytes(job));
      bytes.exchange = own.size() * static_cast<std::size_t>(carried_bytes(job));
    } else {
      bytes.rows = static_cast<std::size_t>(tokens * ssm_token_bytes(job.spec));
      if (!job.update) bytes.scratch = kernel->scratch_bytes(limits_of(own));
      if (job.convolution) bytes.scratch += static_cast<std::size_t>(tokens * conv1d_row_bytes(*job.convolution));
      if (job.rope) {
        const std::int64_t position = sizeof(std::int64_t);
        bytes.scratch += static_cast<std::size_t>(tokens * (position + rope_token_bytes(job, kernel->rotates_rows())));
      }
      bytes.exchange = StateExchange::bytes(job.spec, summary.hops, rank);
    }
    summary.memory.push_back(bytes);
    max_tokens = std::max(max_tokens, tokens);
  }
  const double flops = job.conv1d_only ? ssm_token_flops(job) : ssm_token_flops(job.spec);
  summary.seconds = flops * static_cast<double>(max_tokens) / (rate ? rate(max_tokens) : machine.flops_per_second);
  if (!job.conv1d_only && !summary.hops.hops.empty() &&
      passing_seconds(job, summary, machine) > kernel->cost_of_two_ranges(summary.seconds)) {
    summary.ranges = head_ranges(job.spec.heads, *kernel, 2);
  }
  if (!job.conv1d_only && job.convolution) {
    summary.seconds += conv1d_token_flops(*job.convolution) * static_cast<double>(max_tokens) / conv1d_rate;
  }
  return summary;
}

}  // namespace ringattn
