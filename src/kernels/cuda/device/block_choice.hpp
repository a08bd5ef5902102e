// SPDX-License-Identifier: Apache-2.0
// Backend::pool_keys() and choose_blocks() for a GPU's memory.
#pragma once

#include "base/memory.hpp"
#include "kernels/block_choice.hpp"

namespace ringattn::cuda {

// Enqueues one launch. Without sequences, only loads the code.
void pool_keys(const BlockChoice& choice, Stream stream);
// Enqueues two launches: scores, and lists by them.
void choose_blocks(const BlockChoice& choice, Stream stream);

}  // namespace ringattn::cuda
