// SPDX-License-Identifier: Apache-2.0
// Decides if a job whose queries fit a decode step is decoded. Otherwise Attention computes it from the rows of the
// cache, with the same bits, and Mla from latents in rows.
#pragma once

#include <string>

#include "attention/files/job_input.hpp"
#include "comm/collective.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// Why a kDecode input can't be decoded with the bits of Attention: the attention kernel of its rows, the named one or
// the first that supports the spec, can't decode, or lacks a feature for it, or the block mask does not fit a decode
// step. A kernel of another name would have other bits, and several ranks might choose another kernel than one rank.
// Empty if the named kernel decodes: then the decode reports errors. For latents in rows that Mla computes: no kernel
// decodes them, or only kernels of another backend do. Empty for every other input.
std::string why_not_decoded(const JobInput& input, const KernelRequest& request, KernelScope scope);

// Returns the input, or its rows where it can't be decoded. For inputs that the user did not ask to have decoded.
JobInput decode_or_attend(JobInput input, const KernelRequest& request, KernelScope scope);
// The same for ranks, which go one way: rows where any of them can't decode. Collective.
JobInput decode_or_attend(JobInput input, const KernelRequest& request, const Collective& collective);

}  // namespace ringattn
