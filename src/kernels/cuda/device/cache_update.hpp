// SPDX-License-Identifier: Apache-2.0
// Backend::update_cache() for a GPU's memory.
#pragma once

#include "base/memory.hpp"
#include "kernels/cache_update.hpp"

namespace ringattn::cuda {

// Enqueues the update: one launch. Without sequences, only loads the code.
void update_cache(const CacheUpdate& update, Stream stream);

}  // namespace ringattn::cuda
