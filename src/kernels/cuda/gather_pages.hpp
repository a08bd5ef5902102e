// SPDX-License-Identifier: Apache-2.0
// Rows of a paged cache, copied side by side.
#pragma once

#include <cstdint>
#include <span>

#include "base/memory.hpp"
#include "kernels/cache_view.hpp"

namespace ringattn::cuda {

// Backend::gather_pages().
void gather_pages(void* target, const CacheView& cache, std::span<const std::int32_t> pages, std::int64_t rows,
                  Stream stream);

}  // namespace ringattn::cuda
