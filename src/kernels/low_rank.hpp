// SPDX-License-Identifier: Apache-2.0
// Tables of formats with a rank: of each head's rows the directions that hold most of their energy, which are the first
// right singular vectors of the matrix [tokens, dim]. They are found in host memory as eigenvectors of its products
// with itself in fp64 (gram.hpp), which have the squares of the singular values: of rows of 16 bits no digit that
// matters is lost, and the rows are read once, wherever they lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/row_format.hpp"

namespace ringattn {

// Whether this build can find them: it needs Eigen.
bool has_low_rank();

struct LowRankTables {
  // [heads, rank, dim], orthonormal rows but for what rounding to the dtype moves: row i belongs to the i-th singular
  // value. A direction's sign is such that its greatest component is positive. Outlier channels are 0 in all.
  std::vector<std::byte> basis;
  // Of kHybrid [heads, outliers]: the channels of the greatest energy, ascending in each head.
  std::vector<std::int32_t> outliers;
  // The share of the sum of squares that factors, and outliers beside them, keep.
  double energy_kept = 1.0;
  // Whether no factor of these rows, nor a product of their factors and the basis, can be more than the dtype holds.
  bool bounded = true;
};

// `gram`: the sums of a tensor, [heads, dim, dim], of finite numbers (has_finite_rows()). Throws kUnsupported without
// Eigen.
LowRankTables find_low_rank_tables(const RowFormat& format, const RowShape& shape, std::span<const double> gram,
                                   int threads);

// Whether all numbers of a tensor with such sums are finite.
bool has_finite_rows(const RowShape& shape, std::span<const double> gram);

}  // namespace ringattn
