// SPDX-License-Identifier: Apache-2.0
// Copies rows of a paged cache into a contiguous buffer.
#pragma once

#include <cstdint>
#include <span>

#include "base/memory.hpp"
#include "kernels/common/cache_view.hpp"

namespace ringattn::cuda {

// Implements Backend::gather_pages().
void gather_pages(void* target, const CacheView& cache, std::span<const std::int32_t> pages, std::int64_t rows,
                  Stream stream);

}  // namespace ringattn::cuda
