// SPDX-License-Identifier: Apache-2.0
// Decides if a job whose queries fit a decode step is decoded. Otherwise Attention computes it from the rows of the
// cache, with the same bits, and Mla from latents in rows.
#pragma once

#include <string>

#include "comm/collective.hpp"
#include "kernels/common/registry.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

// Why a kDecode input can't be decoded here with the bits that Attention gives it: the attention kernel for its rows,
// the named one or the first that can, doesn't decode, or lacks something for it, or the block mask doesn't fit a
// step. A kernel of another name would have other bits, and another one would be chosen for one rank than for several.
// Empty where the named kernel is one that decodes: then Decode says what is wrong. Why latents in rows are not
// decoded, though Mla computes them: no kernel decodes them, or those of another backend. Empty for every other input.
std::string why_not_decoded(const JobInput& input, const KernelRequest& request, KernelScope scope);

// Returns the input, or its rows where it can't be decoded. For inputs that the user did not ask to have decoded.
JobInput decode_or_attend(JobInput input, const KernelRequest& request, KernelScope scope);
// The same for ranks, which go one way: rows where any of them can't decode. Collective.
JobInput decode_or_attend(JobInput input, const KernelRequest& request, const Collective& collective);

}  // namespace ringattn
