// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "attention/ring/plan.hpp"

namespace ringattn {

namespace {

int rounds_of(const Plan& plan, std::size_t index) {
  const BlockPlan& block = plan.blocks[index];
  int rounds = 0;
  if (!block.sends.empty()) rounds = block.sends.back().round + 1;
  if (!block.receives.empty()) rounds = std::max(rounds, block.receives.back().round + 1);
  return plan.to_keys == nullptr ? rounds : std::max(rounds, rounds_of(*plan.to_keys, index));
}

// A rank sends and receives at the same time. Each round waits for the messages of the round before it.
double transfer_seconds(const Plan& plan, std::size_t block, const MachineModel& machine) {
  const auto bytes = static_cast<double>(std::max(plan.block_bytes_sent(block), plan.block_bytes_received(block)));
  return rounds_of(plan, block) * machine.latency_seconds + bytes / machine.link_bytes_per_second;
}

}  // namespace

TimeEstimate estimate_time(const Plan& plan, const MachineModel& machine, bool overlap) {
  TimeEstimate time_estimate;
  double arrived = 0.0;          // end of the last receive
  double computed = 0.0;         // end of the last computation
  double computed_before = 0.0;  // end of the computation before it
  for (std::size_t block = 0; block < plan.blocks.size(); ++block) {
    const double begins = overlap ? std::max(arrived, computed_before) : computed;
    arrived = begins + transfer_seconds(plan, block, machine);
    time_estimate.exposed_comm_seconds += std::max(0.0, arrived - computed);
    computed_before = computed;
    computed = std::max(computed, arrived) + plan.block_flops(block) / machine.flops_per_second;
  }
  time_estimate.seconds = computed;
  return time_estimate;
}

}  // namespace ringattn
