// SPDX-License-Identifier: Apache-2.0
// Backend::pool_rows() and choose_block_mask() for a GPU's memory.
#pragma once

#include "base/memory.hpp"
#include "kernels/block_mask_choice.hpp"

namespace ringattn::cuda {

// Enqueues one launch; none without rows.
void pool_rows(const RowPooling& pooling, Stream stream);
// Enqueues two launches: scores, and lists by them; none without query blocks.
void choose_block_mask(const BlockMaskChoice& choice, Stream stream);

}  // namespace ringattn::cuda
