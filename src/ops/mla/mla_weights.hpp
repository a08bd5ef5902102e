// SPDX-License-Identifier: Apache-2.0
// The matrices of latents on a rank, in its kernel's memory: those of all heads, on every rank.
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
  GemmWeights keys;             // of w_uk; none where the input's queries are in the latent
  GemmWeights values;           // of w_uv; none where its O stays there
  std::int64_t non_finite = 0;  // values that are NaN or infinite, on rank 0; elsewhere 0, so that each counts once
};

// Throws what JobInput::read() throws.
MlaWeights load_mla_weights(const JobInput& input, Backend& backend, const Collective& collective, int threads);

// A step in the latent as MlaDecode takes it, over the same cache, with queries and results of the heads.
MlaDecodeInputs mla_decode_inputs(const DecodeInputs& step, const MlaWeights& weights);

}  // namespace ringattn
