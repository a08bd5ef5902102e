// SPDX-License-Identifier: Apache-2.0
// What latent attention is held against: fp64 of the whole formula, latents and matrices in, O out, and a
// same-precision computation in the same form, which rounds what the form rounds (keys and values, or queries and O in
// the latent, then S, P and O) and sums in fp32.
#pragma once

#include "tests/support/accuracy.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {

// Packed O and LSE of a result.
Numbers numbers_of(const JobResult& result, Dtype dtype);

// Expects of a result of job.form that its greatest error of O is at most twice that of the same-precision
// computation, plus 1e-6: as for attention (accuracy.hpp). LSE may be off by as much again, for keys or queries have
// been rounded, plus what attention may be off.
void expect_as_right(const MlaJob& job, const MlaTensors& tensors, const JobResult& result);

}  // namespace ringattn::testing
