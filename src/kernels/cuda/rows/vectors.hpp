// SPDX-License-Identifier: Apache-2.0
// Vector codes of rows, which a kernel of their own makes: a codebook is read for many tokens at once.
#pragma once

#include "base/memory.hpp"
#include "kernels/cuda/rows/row_params.hpp"

namespace ringattn::cuda {

// Enqueues what compress() does of kVector, for the runs of a launch. The caller looks at the launch's error.
void compress_vectors(const RowParams& params, Stream stream);

}  // namespace ringattn::cuda
