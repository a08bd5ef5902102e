// SPDX-License-Identifier: Apache-2.0
// Decides if a job whose queries fit a decode step is decoded. Otherwise Attention computes it from the rows of the
// cache, with the same bits, and Mla from latents in rows.
#pragma once

#include <string>

#include "comm/collective.hpp"
#include "kernels/common/registry.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

// Why a kDecode input can't be decoded here with the bits that Attention gives it: the attention kernel for its rows
// (the named one, or the first that supports them) does not decode, or does not support the step, or the block mask
// does not fit a decode step. A kernel of another name would give other bits, and the choice would differ between one
// rank and several. Empty if the named kernel decodes: then Decode reports the problem. For latents in rows that Mla
// can compute: why they are not decoded, because no kernel decodes them, or only those of another backend. Empty for
// every other input.
std::string why_not_decoded(const JobInput& input, const KernelRequest& request, KernelScope scope);

// Returns the input, or its rows if it can't be decoded. For inputs that the user did not explicitly request to decode.
JobInput decode_or_attend(JobInput input, const KernelRequest& request, KernelScope scope);
// The same for ranks, which all do the same: they use rows if any rank can't decode. Collective.
JobInput decode_or_attend(JobInput input, const KernelRequest& request, const Collective& collective);

}  // namespace ringattn
