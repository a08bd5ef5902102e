// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/synthetic.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace ringattn {

namespace {

// Pairs of dims per batch of SIMD lanes.
constexpr std::int64_t kPairs = 64;

// All heads of a token, [heads, dim]. SIMD lanes continue from head to head, so short rows fill them like long ones.
void make_token(std::uint64_t seed, SyntheticTensor tensor, std::int64_t token, std::int64_t dim, float scale,
                std::span<float> values) {
  const std::int64_t heads = static_cast<std::int64_t>(values.size()) / dim;
  const std::int64_t pairs = (dim + 1) / 2;
  std::int64_t head[kPairs];
  std::int64_t pair[kPairs];
  std::uint32_t words[4][kPairs];
  float made[2][kPairs];
  std::int64_t next_head = 0;
  std::int64_t next_pair = 0;
  for (std::int64_t left = heads * pairs; left > 0; left -= kPairs) {
    const std::int64_t count = std::min(kPairs, left);
    for (std::int64_t i = 0; i < count; ++i) {
      head[i] = next_head;
      pair[i] = next_pair;
      if (++next_pair == pairs) {
        next_pair = 0;
        ++next_head;
      }
    }
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      const PhiloxWords block = philox4x32_10(synthetic_counter(tensor, token, head[i], pair[i]), seed);
      for (int word = 0; word < 4; ++word) words[word][i] = block.word[word];
    }
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      made[0][i] = synthetic_from_words(words[0][i], words[1][i]) * scale;
      made[1][i] = synthetic_from_words(words[2][i], words[3][i]) * scale;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      float* const to = values.data() + head[i] * dim + 2 * pair[i];
      to[0] = made[0][i];
      if (2 * pair[i] + 1 < dim) to[1] = made[1][i];
    }
  }
}

void store(std::span<const float> values, Dtype dtype, std::byte* target) {
  switch (dtype) {
    case Dtype::kF32:
      std::memcpy(target, values.data(), values.size_bytes());
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
  if (rows.heads == 0 || rows.dim == 0) return;
  const float scale = synthetic_scale(tensor, rows.dim);
  // In blocks of about a second at most, with a heartbeat between them.
  constexpr std::int64_t kBlockElements = std::int64_t{1} << 24;
  const std::int64_t block_tokens =
      std::max<std::int64_t>(1, kBlockElements / std::max<std::int64_t>(1, rows.heads * rows.dim));
  for (std::int64_t begin = 0; begin < rows.tokens; begin += block_tokens) {
    heartbeat();
    const std::int64_t end = std::min(rows.tokens, begin + block_tokens);
#pragma omp parallel num_threads(threads)
    {
      const auto dim = static_cast<std::size_t>(rows.dim);
      std::vector<float> values(static_cast<std::size_t>(rows.heads) * dim);
#pragma omp for schedule(static)
      for (std::int64_t row = begin; row < end; ++row) {
        make_token(seed, tensor, token_of_row[static_cast<std::size_t>(row)], rows.dim, scale, values);
        if (rows.head_stride == rows.dim) {
          store(values, rows.dtype, rows.at(row, 0));
          continue;
        }
        for (std::int64_t head = 0; head < rows.heads; ++head) {
          store(std::span(values).subspan(static_cast<std::size_t>(head) * dim, dim), rows.dtype, rows.at(row, head));
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
