// SPDX-License-Identifier: Apache-2.0
// Vector quantization of rows (vq). It has a kernel of its own, because a codebook is read once for many tokens.
#pragma once

#include "base/memory.hpp"
#include "kernels/quant/cuda/row_params.hpp"

namespace ringattn::cuda {

// Enqueues compress() of kVector for the runs of a launch. The caller checks for launch errors.
void compress_vectors(const RowParams& params, Stream stream);

}  // namespace ringattn::cuda
