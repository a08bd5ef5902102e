// SPDX-License-Identifier: Apache-2.0
// Scores of key blocks for query rows, and the choice of the best ones. This is the one definition for prefill
// (attention/block_mask_choice.hpp) and decode (decode/block_choice.hpp), on hosts and devices, so that all choose the
// same key blocks. Products and sums are fp32, each rounded by itself, in a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.hpp"
#include "base/host_device.hpp"

namespace ringattn {

// A mean of rows is their sum in ascending order, times the reciprocal of their number. Host: adds a row of `numbers`
// elements.
inline void add_row(float* sums, const std::byte* row, Dtype dtype, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i, row += size_of(dtype)) sums[i] += load_element(row, dtype);
}
inline void end_mean(float* sums, std::int64_t count, std::int64_t rows) {
  const float factor = 1.0F / static_cast<float>(rows);
  for (std::int64_t i = 0; i < count; ++i) sums[i] *= factor;
}

// A dot product of two rows is summed by this many lanes: lane l sums dims l, l + kScoreLanes, …. Then the lanes are
// added pairwise, l and l + kScoreLanes / 2 first.
inline constexpr int kScoreLanes = 32;

// A block's score is the sum of of_head() over query heads, in ascending order. The argument is the dot product of the
// head's mean query and the block's mean key. Another scoring method is another type like this.
struct MeanScore {
  float scale = 1.0F;  // softmax_scale

  RINGATTN_HOST_DEVICE float of_head(float product) const { return product * scale; }
};

// The dot product on the host. q and k have `dim` elements.
inline float mean_product(const float* q, const float* k, std::int64_t dim) {
  float lanes[kScoreLanes] = {};
  std::int64_t d = 0;
  for (; d + kScoreLanes <= dim; d += kScoreLanes) {
    for (int lane = 0; lane < kScoreLanes; ++lane) lanes[lane] += q[d + lane] * k[d + lane];
  }
  for (int lane = 0; d + lane < dim; ++lane) lanes[lane] += q[d + lane] * k[d + lane];
  for (int half = kScoreLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// Order of a key block that is always chosen.
inline constexpr std::uint32_t kAlwaysTaken = 0xffffffffU;
// Maps scores to integers of the same order: higher is chosen first. NaN counts as −∞, and −0 as 0. No score maps to 0
// or kAlwaysTaken.
RINGATTN_HOST_DEVICE inline std::uint32_t order_of_score(float score) {
  constexpr std::uint32_t kSign = 0x80000000U;
  constexpr std::uint32_t kMin = 0xff800000U;  // −∞
  const std::uint32_t bits = score != score ? kMin : __builtin_bit_cast(std::uint32_t, score + 0.0F);
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// Chooses on the host: writes to `to` the indices of the `count` highest orders, ascending, plus `first`. Ties go to
// the lower index. There must be at least `count` orders.
void choose_best(std::span<const std::uint32_t> orders, std::int32_t first, std::int32_t count, std::int32_t* to);

}  // namespace ringattn
