// SPDX-License-Identifier: Apache-2.0
// Implements Backend::pool_keys() and choose_blocks() on the GPU.
#pragma once

#include "base/memory.hpp"
#include "kernels/decode/block_choice.hpp"

namespace ringattn::cuda {

// Enqueues one launch. Without sequences, only loads the kernel's code.
void pool_keys(const BlockChoice& choice, Stream stream);
// Enqueues two launches: block scores, and the top-k choice.
void choose_blocks(const BlockChoice& choice, Stream stream);

}  // namespace ringattn::cuda
