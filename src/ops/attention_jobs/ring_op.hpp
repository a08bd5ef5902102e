// SPDX-License-Identifier: Apache-2.0
// The common interface of Attention and Mla, for loading, reporting and measuring jobs.
#pragma once

#include <cstddef>

#include "ops/attention/attention.hpp"
#include "ops/mla/mla.hpp"

namespace ringattn {

// Refers to an op, which outlives it.
struct RingOp {
  Backend& backend;
  const AttentionChoice& kernel;  // what computes attention
  const Options& options;
  const JobLayout& layout;
  const Plan& plan;
  const TimeEstimate& time_estimate;
  std::size_t workspace_bytes;
};

inline RingOp ring_op(Attention& op) {
  return {op.backend(), op.kernel(), op.options(), op.layout(), op.plan(), op.time_estimate(), op.workspace_bytes()};
}
inline RingOp ring_op(Mla& op) {
  return {op.backend(), op.kernel(),        op.options().ring,   op.layout(),
          op.plan(),    op.time_estimate(), op.workspace_bytes()};
}

}  // namespace ringattn
