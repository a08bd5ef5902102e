// SPDX-License-Identifier: Apache-2.0
// What the rows of attention, decode and MLA in the table of ops share: they open one kind of input, and a file's
// tensors and lengths, not its user, say which of them computes it.
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

// What a model's layer does with its scores, as settings: mask, window, softcap, scale.
void fill_scores(const ModelLayer& layer, const Settings& settings, const FillSetting& fill);
// These, and the heads and dims of keys and values.
void fill_attention(const ModelLayer& layer, const Settings& settings, const FillSetting& fill);

}  // namespace ringattn
