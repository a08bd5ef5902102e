// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/input_cost.hpp"

#include "attention/tokens/cost.hpp"

namespace ringattn {

double job_flops(const JobInput& input) {
  if (input.mla() == nullptr) return job_flops(input.job());
  const MlaSpec& spec = input.mla()->spec;
  return visible_pairs(input.job()) * pair_flops(form_spec(spec, input.form().form, spec.heads));
}

}  // namespace ringattn
