// SPDX-License-Identifier: Apache-2.0
// Sums and maxima of the plans of all ranks of a world. Needs no ranks; used by `ringattn plan`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/options.hpp"
#include "attention/tokens/layout.hpp"
#include "ops/attention/plan_summary.hpp"

namespace ringattn {

struct BlockPlanSummary {
  std::int64_t first_token = 0;
  std::int64_t last_token = 0;
  double flops = 0.0;
  double max_flops = 0.0;           // of the rank that has most
  std::int64_t bytes_received = 0;  // by all ranks
  std::int64_t max_bytes_received = 0;

  // FLOPs of the rank that has most, divided by the mean; 1 if there are no FLOPs.
  double balance(int world) const { return flops > 0.0 ? max_flops / (flops / world) : 1.0; }
};

struct WorldPlanSummary {
  std::int64_t q_tokens = 0;
  JobLayout layout;
  std::vector<BlockPlanSummary> blocks = {};
  std::vector<double> rank_flops = {};  // [ranks]
  std::int64_t bytes_received = 0;      // by all ranks
  std::int64_t max_bytes_received = 0;
  std::size_t max_memory = 0;
  std::size_t max_state = 0;          // bytes of state that is kept between blocks; 0: no state is kept
  double seconds = 0.0;               // of the slowest rank
  double exposed_comm_seconds = 0.0;  // of the rank that waits longest

  int world() const { return static_cast<int>(rank_flops.size()); }
  double flops() const;
  double balance() const;  // as BlockPlanSummary::balance()
  double flops_per_second_per_rank() const;
};

// Throws what WorldPlans throws.
WorldPlanSummary summarize_world_plan(const RingJob& job, const Options& options, Route route, int world);

}  // namespace ringattn
