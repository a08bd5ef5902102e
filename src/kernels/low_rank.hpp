// SPDX-License-Identifier: Apache-2.0
// Bases of low rank: of each head's rows the directions that hold most of their energy, which are the first right
// singular vectors of the matrix [tokens, dim]. They are found as eigenvectors of its Gram matrix in fp64, which has
// the squares of the singular values: of rows of 16 bits no digit that matters is lost, and the matrix is only read
// once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/tensor.hpp"

namespace ringattn {

// Whether this build can find them: it needs Eigen.
bool has_low_rank();

// [heads, rank, dim], orthonormal rows, rounded to `rows`' dtype (bf16 or fp16): row i belongs to the i-th singular
// value. A direction's sign is such that its greatest component is positive. `outliers`: [heads, outlier_count]
// channels that count as 0. Throws kUnsupported without Eigen.
std::vector<std::byte> find_basis(const TensorView& rows, std::int64_t rank, const std::vector<std::int32_t>& outliers,
                                  int threads);

// [heads, count] channels of the greatest energy, ascending in each head.
std::vector<std::int32_t> find_outlier_channels(const TensorView& rows, std::int64_t count, int threads);

}  // namespace ringattn
