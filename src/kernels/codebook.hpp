// SPDX-License-Identifier: Apache-2.0
// Codebooks for vector codes: k-means over a sample of a tensor's tokens, with a fixed seed and fixed orders of sums.
// So a tensor has one codebook, whatever the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/tensor.hpp"

namespace ringattn {

// [heads, dim / width, 256, width] of `rows`' dtype, bf16 or fp16. Vectors start as tokens that `seed` draws and move
// to the means of their elements, a fixed number of times.
std::vector<std::byte> find_codebook(const TensorView& rows, std::int64_t width, std::uint64_t seed, int threads);

}  // namespace ringattn
