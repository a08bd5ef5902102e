// SPDX-License-Identifier: Apache-2.0
// Implements Backend::pool_rows() and choose_block_mask() on the GPU.
#pragma once

#include "base/memory.hpp"
#include "kernels/attention/block_mask_choice.hpp"

namespace ringattn::cuda {

// Enqueues one launch, or none without rows.
void pool_rows(const RowPooling& pooling, Stream stream);
// Enqueues two launches: block scores, and the top-k choice. Enqueues none without query blocks.
void choose_block_mask(const BlockMaskChoice& choice, Stream stream);

}  // namespace ringattn::cuda
