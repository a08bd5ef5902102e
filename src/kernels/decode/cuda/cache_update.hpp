// SPDX-License-Identifier: Apache-2.0
// Implements Backend::update_cache() on the GPU.
#pragma once

#include "base/memory.hpp"
#include "kernels/decode/cache_update.hpp"

namespace ringattn::cuda {

// Enqueues the update as one launch. Without sequences, only loads the kernels' code, with a rotation its own, too.
void update_cache(const CacheUpdate& update, Stream stream);

}  // namespace ringattn::cuda
