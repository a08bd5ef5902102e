// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/world_plan_summary.hpp"

#include <algorithm>
#include <numeric>

namespace ringattn {

double WorldPlanSummary::flops() const { return std::accumulate(rank_flops.begin(), rank_flops.end(), 0.0); }

double WorldPlanSummary::balance() const {
  const double mean = flops() / world();
  return mean > 0.0 ? *std::max_element(rank_flops.begin(), rank_flops.end()) / mean : 1.0;
}

double WorldPlanSummary::flops_per_second_per_rank() const { return seconds > 0.0 ? flops() / seconds / world() : 0.0; }

WorldPlanSummary summarize_world_plan(const RingJob& job, const Options& options, Route route, int world) {
  const WorldPlans world_plans(job, options, route, world);
  WorldPlanSummary sum{job.work.batch.q_tokens(), world_plans.layout()};
  for (int rank = 0; rank < world; ++rank) {
    const Plan plan = world_plans.plan(rank);
    const TimeEstimate time_estimate = estimate_time(plan, options.machine, options.overlap);
    sum.blocks.resize(plan.blocks.size());
    for (std::size_t b = 0; b < plan.blocks.size(); ++b) {
      const BlockPlan& from = plan.blocks[b];
      BlockPlanSummary& to = sum.blocks[b];
      to.first_token = from.first_token;
      to.last_token = from.last_token;
      to.flops += plan.block_flops(b);
      to.max_flops = std::max(to.max_flops, plan.block_flops(b));
      to.bytes_received += plan.block_bytes_received(b);
      to.max_bytes_received = std::max(to.max_bytes_received, plan.block_bytes_received(b));
    }
    sum.rank_flops.push_back(plan.flops());
    sum.bytes_received += plan.bytes_received();
    sum.max_bytes_received = std::max(sum.max_bytes_received, plan.bytes_received());
    sum.max_memory = std::max(sum.max_memory, plan.memory_bytes);
    sum.seconds = std::max(sum.seconds, time_estimate.seconds);
    sum.exposed_comm_seconds = std::max(sum.exposed_comm_seconds, time_estimate.exposed_comm_seconds);
  }
  return sum;
}

}  // namespace ringattn
