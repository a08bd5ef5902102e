// SPDX-License-Identifier: Apache-2.0
// The matrices of MLA on a rank, in its kernel's memory. Every rank has those of all heads.
#pragma once

#include <cstdint>

#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/decode/decode.hpp"
#include "ops/mla/mla_decode.hpp"

namespace ringattn {

struct MlaWeights {
  Buffer w_uk, w_uv;
  GemmWeights keys;             // w_uk; none if the input's queries are in the latent space
  GemmWeights values;           // w_uv; none if O stays in the latent space
  std::int64_t non_finite = 0;  // NaN and infinite values on rank 0, and 0 on other ranks, so that each counts once
};

// Throws the errors of JobInput::read().
MlaWeights load_mla_weights(const JobInput& input, Backend& backend, const Collective& collective, int threads);

// Converts a step in the latent space to the inputs of MlaDecode over the same cache, with queries and results of the
// heads.
MlaDecodeInputs mla_decode_inputs(const DecodeInputs& step, const MlaWeights& weights);

}  // namespace ringattn
