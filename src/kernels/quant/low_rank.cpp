// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/low_rank.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#ifdef RINGATTN_HAVE_EIGEN
#include <Eigen/Eigenvalues>
#endif

#include "base/error.hpp"

namespace ringattn {

bool has_finite_rows(const RowShape& shape, std::span<const double> gram) {
  for (std::int64_t i = 0; i < shape.heads * shape.dim; ++i) {
    const std::int64_t channel = i % shape.dim;
    if (!std::isfinite(gram[static_cast<std::size_t>(i * shape.dim + channel)])) return false;
  }
  return true;
}

#ifdef RINGATTN_HAVE_EIGEN

namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Matrix gram_of(std::span<const double> sums, std::int64_t dim) {
  Matrix gram(dim, dim);
  for (std::int64_t i = 0; i < dim; ++i) {
    for (std::int64_t j = i; j < dim; ++j) gram(i, j) = gram(j, i) = sums[static_cast<std::size_t>(i * dim + j)];
  }
  return gram;
}

// The outlier channels of a head, ascending.
std::vector<std::int32_t> outlier_channels(const Matrix& gram, int count) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(gram.rows()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](std::int32_t a, std::int32_t b) { return gram(a, a) > gram(b, b); });
  order.resize(static_cast<std::size_t>(count));
  std::ranges::sort(order);
  return order;
}

// Writes a head's directions to `out` in the dtype, and returns them as rows in fp64.
Matrix find_directions(Matrix gram, const RowFormat& format, Dtype dtype, std::span<const std::int32_t> outliers,
                       std::byte* out) {
  const Eigen::Index dim = gram.rows();
  for (const std::int32_t channel : outliers) {
    gram.row(channel).setZero();
    gram.col(channel).setZero();
  }
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(gram);
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  Matrix directions(format.rank, dim);
  for (std::int64_t r = 0; r < format.rank; ++r) {  // eigenvalues ascend
    Eigen::VectorXd vector = solver.eigenvectors().col(dim - 1 - r);
    for (const std::int32_t channel : outliers) vector(channel) = 0.0;
    Eigen::Index greatest = 0;
    vector.cwiseAbs().maxCoeff(&greatest);
    const double sign = vector(greatest) < 0.0 ? -1.0 : 1.0;
    for (std::int64_t c = 0; c < dim; ++c) {
      std::byte* const at = out + (r * dim + c) * element;
      store_element(at, dtype, static_cast<float>(sign * vector(c)));
      directions(r, c) = static_cast<double>(load_element(at, dtype));
    }
  }
  return directions;
}

}  // namespace

bool has_low_rank() { return true; }

LowRankTables find_low_rank_tables(const RowFormat& format, const RowShape& shape, std::span<const double> gram,
                                   int threads) {
  const std::int64_t dim = shape.dim;
  const std::int64_t basis_bytes = format.rank * dim * static_cast<std::int64_t>(size_of(shape.dtype));
  LowRankTables tables;
  tables.basis.resize(static_cast<std::size_t>(shape.heads * basis_bytes));
  tables.outliers.resize(static_cast<std::size_t>(shape.heads * format.outliers));
  std::vector<double> kept(static_cast<std::size_t>(shape.heads)), all(kept.size());
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (std::int64_t head = 0; head < shape.heads; ++head) {
    const auto at = static_cast<std::size_t>(head);
    const Matrix sums = gram_of(gram.subspan(at * static_cast<std::size_t>(dim * dim)), dim);
    const std::vector<std::int32_t> outliers = outlier_channels(sums, format.outliers);
    std::ranges::copy(outliers, tables.outliers.begin() + head * format.outliers);
    const Matrix directions =
        find_directions(sums, format, shape.dtype, outliers, tables.basis.data() + head * basis_bytes);
    all[at] = sums.trace();
    kept[at] = (directions * sums).cwiseProduct(directions).sum();
    for (const std::int32_t channel : outliers) kept[at] += sums(channel, channel);
  }
  static_cast<void>(threads);
  const double energy = std::accumulate(all.begin(), all.end(), 0.0);
  if (energy > 0.0) tables.energy_kept = std::accumulate(kept.begin(), kept.end(), 0.0) / energy;
  // A factor is at most the norm of a row times that of its direction, and a product at most the norm of the factors
  // times that of a basis column. Rounding leaves the norms of directions and columns below 1.1. No row's norm exceeds
  // the square root of the head's trace.
  const double limit = shape.dtype == Dtype::kBf16 ? 0x1.fep127 : 65504.0;
  tables.bounded = std::ranges::all_of(all, [&](double trace) { return 2.0 * std::sqrt(trace) <= limit; });
  return tables;
}

#else

bool has_low_rank() { return false; }

LowRankTables find_low_rank_tables(const RowFormat&, const RowShape&, std::span<const double>, int) {
  fail(ErrorCode::kUnsupported, "a basis of low rank can't be found", "this build has no Eigen",
       "Install libeigen3-dev and build again, or choose another method.");
}

#endif

}  // namespace ringattn
