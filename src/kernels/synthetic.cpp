// SPDX-License-Identifier: Apache-2.0
#include "kernels/synthetic.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/pulse.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace ringattn {

namespace {

// Pairs of dims that are made at once, side by side in SIMD lanes.
constexpr std::int64_t kPairs = 64;

// Dims [0, dim) of one (token, head).
void make_head(std::uint64_t seed, SyntheticTensor tensor, std::int64_t token, std::int64_t head, std::int64_t dim,
               float scale, float* values) {
  std::uint32_t words[4][kPairs];
  float made[2 * kPairs];
  for (std::int64_t first = 0; 2 * first < dim; first += kPairs) {
#pragma omp simd
    for (std::int64_t i = 0; i < kPairs; ++i) {
      const PhiloxWords block = philox4x32_10(synthetic_counter(tensor, token, head, first + i), seed);
      for (int word = 0; word < 4; ++word) words[word][i] = block.word[word];
    }
#pragma omp simd
    for (std::int64_t i = 0; i < kPairs; ++i) {
      made[2 * i] = synthetic_from_words(words[0][i], words[1][i]) * scale;
      made[2 * i + 1] = synthetic_from_words(words[2][i], words[3][i]) * scale;
    }
    std::copy_n(made, std::min(2 * kPairs, dim - 2 * first), values + 2 * first);
  }
}

void store_head(const std::vector<float>& values, Dtype dtype, std::byte* target) {
  switch (dtype) {
    case Dtype::kF32:
      std::memcpy(target, values.data(), values.size() * sizeof(float));
      return;
    case Dtype::kBf16:
    case Dtype::kF16:
      for (std::size_t i = 0; i < values.size(); ++i) store_element(target + 2 * i, dtype, values[i]);
      return;
  }
}

}  // namespace

void fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                    const MutableTensorView& rows, [[maybe_unused]] int threads) {
  if (rows.tokens != total_tokens(runs)) {
    fail(ErrorCode::kInternal, fmt::format("{} rows for {} tokens", rows.tokens, total_tokens(runs)));
  }
  std::vector<std::int64_t> token_of_row;
  token_of_row.reserve(static_cast<std::size_t>(rows.tokens));
  for (const PackedRun& run : runs) {
    for (std::int64_t token = run.begin; token < run.end; ++token) token_of_row.push_back(token);
  }
#ifdef _OPENMP
  if (threads <= 0) threads = omp_get_max_threads();
#endif
  const float scale = synthetic_scale(tensor, rows.dim);
  // In pieces of about a second at most: between them the rank shows that it works.
  constexpr std::int64_t kPieceElements = std::int64_t{1} << 24;
  const std::int64_t piece =
      std::max<std::int64_t>(1, kPieceElements / std::max<std::int64_t>(1, rows.heads * rows.dim));
  for (std::int64_t begin = 0; begin < rows.tokens; begin += piece) {
    beat();
    const std::int64_t end = std::min(rows.tokens, begin + piece);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> values(static_cast<std::size_t>(rows.dim));
#pragma omp for schedule(static)
      for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t head = 0; head < rows.heads; ++head) {
          make_head(seed, tensor, token_of_row[static_cast<std::size_t>(row)], head, rows.dim, scale, values.data());
          store_head(values, rows.dtype, rows.at(row, head));
        }
      }
    }
  }
}

std::vector<float> synthetic_sinks(std::uint64_t seed, std::int64_t heads) {
  std::vector<float> sinks(static_cast<std::size_t>(heads));
  for (std::int64_t head = 0; head < heads; ++head) {
    sinks[static_cast<std::size_t>(head)] = synthetic_value(seed, SyntheticTensor::kSinks, 0, head, 0);
  }
  return sinks;
}

}  // namespace ringattn
