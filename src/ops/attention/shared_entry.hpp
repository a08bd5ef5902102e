// SPDX-License-Identifier: Apache-2.0
// What the entries of attention, decode and MLA in the table of ops share. They open the same kind of input. The
// tensors and lengths of a file, not the user, determine which of the three computes it.
#pragma once

#include <memory>

#include "ops/common/op.hpp"
#include "ops/jobs/op_entry.hpp"
#include "ops/jobs/op_job.hpp"

namespace ringattn {

std::unique_ptr<OpJob> make_attention_job(Op op, const OpRequest& request);
template <Op kOp>
std::unique_ptr<OpJob> make_attention_job(const OpRequest& request) {
  return make_attention_job(kOp, request);
}

// Fills in the settings of a model's layer that concern scores: mask, window, softcap, scale.
void fill_scores(const ModelLayer& layer, const Settings& settings, const FillSetting& fill);
// Fills in these, and the heads and dims of keys and values.
void fill_attention(const ModelLayer& layer, const Settings& settings, const FillSetting& fill);

}  // namespace ringattn
