// SPDX-License-Identifier: Apache-2.0
// References for MLA: the whole formula in fp64, from latents and matrices to O, and a same-precision reference in the
// same form, which rounds what the form rounds (keys and values, or queries and O in the latent space, then S, P and O)
// and sums in fp32.
#pragma once

#include "tests/support/accuracy.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {

// Packed O and LSE of a result.
Numbers numbers_of(const JobResult& result, Dtype dtype);

// Expects that the greatest error of O is at most twice that of the same-precision reference in job.form, plus 1e-6, as
// for attention (accuracy.hpp). LSE may have this error because keys or queries were rounded, in addition to the error
// that is allowed for attention.
void expect_as_right(const MlaJob& job, const MlaTensors& tensors, const JobResult& result);

}  // namespace ringattn::testing
