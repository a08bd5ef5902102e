// SPDX-License-Identifier: Apache-2.0
// What the front doors of latent attention check of matrices.
#pragma once

#include "kernels/batched_gemm.hpp"
#include "kernels/mla.hpp"

namespace ringattn {

// Of those that are given. Throws kUsage, with both shapes, where matrices are not [heads, outer, latent_dim] of the
// job, or neither their rows nor their columns lie without gaps, or where what they multiply is the caller's.
void check_matrices(const GemmWeights& w_uk, const GemmWeights& w_uv, const MlaSpec& spec);

}  // namespace ringattn
