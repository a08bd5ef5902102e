// SPDX-License-Identifier: Apache-2.0
// What the entries of SSD, selective scan and the convolution in the table of ops share.
#pragma once

#include <memory>

#include "ops/common/op.hpp"
#include "ops/jobs/op_entry.hpp"
#include "ops/jobs/op_job.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

SsmInput make_ssm_input(Op op, const OpRequest& request);
// The decay of synthetic linear attention (ops/linear_attention).
SsmDecay linear_decay(const Settings& settings);
std::unique_ptr<OpJob> make_ssm_job(Op op, const OpRequest& request);
template <Op kOp>
std::unique_ptr<OpJob> make_ssm_job(const OpRequest& request) {
  return make_ssm_job(kOp, request);
}

}  // namespace ringattn
