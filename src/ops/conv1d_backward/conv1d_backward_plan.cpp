// SPDX-License-Identifier: Apache-2.0
#include "ops/conv1d_backward/conv1d_backward_plan.hpp"

#include <algorithm>
#include <numeric>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "kernels/common/token_units.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kReceivedParts = 4;  // receive buffers for each run (CausalConv1dBackward)

}  // namespace

double conv1d_backward_token_flops(const CausalConv1dSpec& spec) { return 3.0 * conv1d_token_flops(spec); }

const SsmMemory& Conv1dBackwardPlan::max_memory() const {
  return *std::ranges::max_element(memory, {}, [](const SsmMemory& bytes) { return bytes.total(); });
}

std::int64_t Conv1dBackwardPlan::bytes_moved() const {
  return std::accumulate(received.begin(), received.end(), std::int64_t{0});
}

Conv1dBackwardPlan plan_conv1d_backward(const CausalConv1dJob& job,
                                        const std::optional<std::vector<std::vector<TokenRun>>>& runs, int world,
                                        double flops_per_second) {
  const CausalConv1dSpec& spec = job.spec;
  Conv1dBackwardPlan plan{conv1d_layout(job.lengths, runs, world), {}, {}, 0.0};
  const StateHops hops = state_hops(plan.layout);
  const StateOwners owners = state_owners(plan.layout);
  const std::int64_t row_bytes = spec.halo_bytes() / spec.halo_tokens();
  const std::int64_t channel_bytes = (spec.width + 1) * static_cast<std::int64_t>(sizeof(float));  // of a unit
  std::vector<std::int64_t> units(static_cast<std::size_t>(world));
  std::int64_t all_units = 0;
  for (const OwnedRun& run : plan.layout.owners()) {
    const std::int64_t count = (run.tokens + kTokenUnit - 1) / kTokenUnit;
    units[static_cast<std::size_t>(run.owner)] += count;
    all_units += count;
  }
  plan.received.resize(static_cast<std::size_t>(world));
  for (const std::vector<StateHop>& step : hops.hops) {
    for (const StateHop& hop : step) {
      const std::int64_t tokens = plan.layout.runs(hop.to)[static_cast<std::size_t>(hop.to_run)].tokens();
      const std::int64_t next = std::min<std::int64_t>(spec.halo_tokens(), tokens);
      plan.received[static_cast<std::size_t>(hop.to)] += spec.halo_bytes();
      plan.received[static_cast<std::size_t>(hop.from)] += 2 * next * row_bytes;  // x and dy
    }
  }
  std::int64_t max_tokens = 0;
  for (int rank = 0; rank < world; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::int64_t channels =
        std::int64_t{spec.channels} * (rank + 1) / world - std::int64_t{spec.channels} * rank / world;
    const std::int64_t tokens = plan.layout.tokens(rank);
    max_tokens = std::max(max_tokens, tokens);
    if (world > 1) {
      plan.received[r] +=
          (all_units - units[r]) * channels * channel_bytes + (spec.channels - channels) * channel_bytes;
    }
    SsmMemory bytes;
    bytes.rows = static_cast<std::size_t>(3 * tokens * row_bytes);  // x, dy and dx
    const std::int64_t beginning = std::ranges::count(owners.initial, rank);
    bytes.states = job.initial_halos ? static_cast<std::size_t>(2 * beginning * spec.halo_bytes()) : 0;
    bytes.scratch = static_cast<std::size_t>((units[r] + 1) * spec.channels * channel_bytes);
    const auto own_runs = static_cast<std::int64_t>(plan.layout.runs(rank).size());
    bytes.exchange = static_cast<std::size_t>(own_runs * kReceivedParts * spec.halo_bytes() +
                                              (world > 1 ? all_units * channels * channel_bytes : 0));
    plan.memory.push_back(bytes);
  }
  plan.seconds = conv1d_backward_token_flops(spec) * static_cast<double>(max_tokens) / flops_per_second;
  return plan;
}

}  // namespace ringattn
