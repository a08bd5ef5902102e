// SPDX-License-Identifier: Apache-2.0
#include "ops/linear_attention/linear_attention.hpp"

#include <cmath>

#include "base/error.hpp"

namespace ringattn {

SsmJob ssm_job(const LinearAttentionJob& job) {
  const LinearAttentionSpec& given = job.spec;
  if (given.decay == SsmDecay::kDt) {
    fail(ErrorCode::kUsage, "linear attention with the decay of an SSM", "it has log-decays",
         "Use kHead, kToken or kDim.");
  }
  SsmJob made;
  SsmSpec& spec = made.spec;
  spec.dtype = given.dtype;
  spec.heads = spec.groups = given.heads;
  spec.state_dim = given.dim;
  spec.head_dim = given.dim_v == 0 ? given.dim : given.dim_v;
  spec.decay = given.decay;
  spec.scale = given.scale.value_or(1.0F / std::sqrt(static_cast<float>(given.dim)));
  made.rope = given.rope;
  made.lengths = job.lengths;
  made.initial_states = job.initial_state;
  made.final_states = job.final_states;
  made.update = job.update;
  return made;
}

SsmInputs LinearAttention::ssm_inputs(const LinearAttentionInputs& inputs) {
  SsmInputs mapped;
  mapped.x = inputs.v;
  mapped.b = inputs.k;
  mapped.c = inputs.q;
  mapped.dt = inputs.log_decay;
  mapped.a = inputs.head_log_decay;
  mapped.initial_states = inputs.initial_state;
  mapped.positions = inputs.positions;
  mapped.slots = inputs.slots;
  return mapped;
}

}  // namespace ringattn
