// SPDX-License-Identifier: Apache-2.0
// Layout, memory, transfers and time of the gradients of the causal conv1d, computed from their shape. No ranks run
// here.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "ops/conv1d/causal_conv1d_backward.hpp"
#include "ops/ssm/ssm_plan_summary.hpp"

namespace ringattn {

double conv1d_backward_token_flops(const CausalConv1dSpec& spec);

struct Conv1dBackwardPlan {
  Layout layout;
  std::vector<SsmMemory> memory;       // [ranks]; `states`: halos and their gradients
  std::vector<std::int64_t> received;  // [ranks] bytes: tokens around runs, units, and sums of weights' gradients
  double seconds = 0.0;                // compute time of the rank with the most tokens

  const SsmMemory& max_memory() const;
  std::int64_t bytes_moved() const;
};

// `runs`: as in CausalConv1dOptions.
Conv1dBackwardPlan plan_conv1d_backward(const CausalConv1dJob& job,
                                        const std::optional<std::vector<std::vector<TokenRun>>>& runs, int world,
                                        double flops_per_second);

}  // namespace ringattn
