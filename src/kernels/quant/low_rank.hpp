// SPDX-License-Identifier: Apache-2.0
// Tables of low-rank formats: for each head's rows the directions with the most energy, which are the first right
// singular vectors of the matrix [tokens, dim]. They are computed in host memory as eigenvectors of the fp64 Gram
// matrix (quant/gram.hpp), whose eigenvalues are the squared singular values. For 16-bit rows the precision suffices,
// and the rows are read only once, wherever they are stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/quant/row_format.hpp"

namespace ringattn {

// Whether this build supports them: it requires Eigen.
bool has_low_rank();

struct LowRankTables {
  // [heads, rank, dim], rows orthonormal except for rounding to the dtype. Row i belongs to the i-th largest singular
  // value. Signs are such that a direction's largest component is positive. Outlier channels are 0.
  std::vector<std::byte> basis;
  // kHybrid: [heads, outliers], the channels with the most energy, ascending in each head.
  std::vector<std::int32_t> outliers;
  // The fraction of the sum of squares that factors and outliers keep.
  double energy_kept = 1.0;
  // Whether no factor of these rows, and no product of their factors and the basis, can overflow the dtype.
  bool bounded = true;
};

// `gram` has a tensor's sums, [heads, dim, dim], of finite numbers (has_finite_rows()). Throws kUnsupported without
// Eigen.
LowRankTables find_low_rank_tables(const RowFormat& format, const RowShape& shape, std::span<const double> gram,
                                   int threads);

// Whether all elements of a tensor with such sums are finite.
bool has_finite_rows(const RowShape& shape, std::span<const double> gram);

}  // namespace ringattn
