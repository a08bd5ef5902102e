// SPDX-License-Identifier: Apache-2.0
// What the front doors of latent attention check of matrices.
#pragma once

#include <string_view>

#include "kernels/head_product.hpp"
#include "kernels/latent.hpp"

namespace ringattn {

// Throws kUsage, with both shapes, where the matrices are not [heads, outer, latent_dim] of the job, or neither their
// rows nor their columns lie without gaps.
void check_matrices(std::string_view name, const HeadMatrices& matrices, const LatentSpec& spec, int outer);

}  // namespace ringattn
