// SPDX-License-Identifier: Apache-2.0
// Checks of the matrices w_uk and w_uv. Called by Mla and MlaDecode.
#pragma once

#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/mla/mla.hpp"

namespace ringattn {

// Checks those that are given. Throws kUsage, with both shapes, if a matrix is not [heads, head_dim, latent_dim] or
// [heads, head_dim_v, latent_dim], if neither its rows nor its columns are contiguous, or if the caller has already
// multiplied by it.
void check_matrices(const GemmWeights& w_uk, const GemmWeights& w_uv, const MlaSpec& spec);

}  // namespace ringattn
