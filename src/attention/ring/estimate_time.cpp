// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "attention/ring/plan.hpp"

namespace ringattn {

namespace {

// A rank sends and receives at the same time. Each round waits for the messages of the round before it.
double transfer_seconds(const BlockPlan& block, const MachineModel& machine) {
  int rounds = 0;
  if (!block.sends.empty()) rounds = block.sends.back().round + 1;
  if (!block.receives.empty()) rounds = std::max(rounds, block.receives.back().round + 1);
  const auto bytes = static_cast<double>(std::max(block.bytes_sent, block.bytes_received));
  return rounds * machine.latency_seconds + bytes / machine.link_bytes_per_second;
}

}  // namespace

TimeEstimate estimate_time(const Plan& plan, const MachineModel& machine, bool overlap) {
  TimeEstimate time_estimate;
  double arrived = 0.0;          // end of the last receive
  double computed = 0.0;         // end of the last computation
  double computed_before = 0.0;  // end of the computation before it
  for (const BlockPlan& block : plan.blocks) {
    const double begins = overlap ? std::max(arrived, computed_before) : computed;
    arrived = begins + transfer_seconds(block, machine);
    time_estimate.exposed_comm_seconds += std::max(0.0, arrived - computed);
    computed_before = computed;
    computed = std::max(computed, arrived) + block.flops / machine.flops_per_second;
  }
  time_estimate.seconds = computed;
  return time_estimate;
}

}  // namespace ringattn
