// SPDX-License-Identifier: Apache-2.0
#include "kernels/low_rank.hpp"

#include <algorithm>
#include <numeric>
#include <span>

#ifdef RINGATTN_HAVE_EIGEN
#include <Eigen/Eigenvalues>
#endif

#include "base/error.hpp"
#include "base/pulse.hpp"
#include "kernels/row_coder.hpp"

namespace ringattn {

std::vector<std::int32_t> find_outlier_channels(const TensorView& rows, std::int64_t count, int threads) {
  std::vector<std::int32_t> channels(static_cast<std::size_t>(rows.heads * count));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t head = 0; head < rows.heads; ++head) {
    std::vector<double> energy(static_cast<std::size_t>(rows.dim));
    std::vector<float> row(energy.size());
    for (std::int64_t token = 0; token < rows.tokens; ++token) {
      widen_row(rows.at(token, head), rows.dtype, rows.dim, row.data());
      for (std::size_t c = 0; c < row.size(); ++c)
        energy[c] += static_cast<double>(row[c]) * static_cast<double>(row[c]);
    }
    std::vector<std::int32_t> order(energy.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](std::int32_t a, std::int32_t b) {
      return energy[static_cast<std::size_t>(a)] > energy[static_cast<std::size_t>(b)];
    });
    std::sort(order.begin(), order.begin() + count);
    std::copy_n(order.begin(), count, channels.begin() + head * count);
  }
  static_cast<void>(threads);
  return channels;
}

#ifdef RINGATTN_HAVE_EIGEN

namespace {

// Tokens whose products are summed at a time.
constexpr std::int64_t kChunk = 256;

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Rowsᵀ · rows of a head, chunk by chunk in ascending order.
Matrix gram_of(const TensorView& rows, std::int64_t head, std::span<const std::int32_t> outliers) {
  Matrix gram = Matrix::Zero(rows.dim, rows.dim);
  Matrix chunk(kChunk, rows.dim);
  std::vector<float> row(static_cast<std::size_t>(rows.dim));
  for (std::int64_t begin = 0; begin < rows.tokens; begin += kChunk) {
    const std::int64_t count = std::min(kChunk, rows.tokens - begin);
    for (std::int64_t i = 0; i < count; ++i) {
      widen_row(rows.at(begin + i, head), rows.dtype, rows.dim, row.data());
      for (const std::int32_t channel : outliers) row[static_cast<std::size_t>(channel)] = 0.0F;
      for (std::int64_t c = 0; c < rows.dim; ++c) chunk(i, c) = static_cast<double>(row[static_cast<std::size_t>(c)]);
    }
    gram.noalias() += chunk.topRows(count).transpose() * chunk.topRows(count);
  }
  return gram;
}

}  // namespace

bool has_low_rank() { return true; }

std::vector<std::byte> find_basis(const TensorView& rows, std::int64_t rank, const std::vector<std::int32_t>& outliers,
                                  int threads) {
  const auto element = static_cast<std::int64_t>(size_of(rows.dtype));
  std::vector<std::byte> basis(static_cast<std::size_t>(rows.heads * rank * rows.dim * element));
  const auto kept = static_cast<std::int64_t>(outliers.size()) / std::max<std::int64_t>(1, rows.heads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t head = 0; head < rows.heads; ++head) {
    const std::span<const std::int32_t> channels(outliers.data() + head * kept, static_cast<std::size_t>(kept));
    const Eigen::SelfAdjointEigenSolver<Matrix> solver(gram_of(rows, head, channels));
    for (std::int64_t r = 0; r < rank; ++r) {  // eigenvalues ascend
      const auto vector = solver.eigenvectors().col(rows.dim - 1 - r);
      Eigen::Index greatest = 0;
      vector.cwiseAbs().maxCoeff(&greatest);
      const double sign = vector(greatest) < 0.0 ? -1.0 : 1.0;
      std::byte* const out = basis.data() + (head * rank + r) * rows.dim * element;
      for (std::int64_t c = 0; c < rows.dim; ++c) {
        store_element(out + c * element, rows.dtype, static_cast<float>(sign * vector(c)));
      }
    }
  }
  static_cast<void>(threads);
  return basis;
}

#else

bool has_low_rank() { return false; }

std::vector<std::byte> find_basis(const TensorView&, std::int64_t, const std::vector<std::int32_t>&, int) {
  fail(ErrorCode::kUnsupported, "a basis of low rank can't be found", "this build has no Eigen",
       "Install libeigen3-dev and build again, or choose another method.");
}

#endif

}  // namespace ringattn
