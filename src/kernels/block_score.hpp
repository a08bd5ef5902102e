// SPDX-License-Identifier: Apache-2.0
// How much a block of keys seems to matter to query rows, and which blocks a list takes: the one definition of it, for
// prefills (block_mask_choice.hpp) and decoding steps (block_choice.hpp), on the host and on devices, so that all of
// them choose the same blocks. Products and sums are of 32 bits, each rounded by itself, in a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.hpp"
#include "base/host_device.hpp"

namespace ringattn {

// A mean of rows is their sum in ascending order times one over their number. On the host: adds a row of `numbers`.
inline void add_row(float* sums, const std::byte* row, Dtype dtype, std::int64_t numbers) {
  for (std::int64_t i = 0; i < numbers; ++i, row += size_of(dtype)) sums[i] += load_element(row, dtype);
}
inline void end_mean(float* sums, std::int64_t numbers, std::int64_t rows) {
  const float factor = 1.0F / static_cast<float>(rows);
  for (std::int64_t i = 0; i < numbers; ++i) sums[i] *= factor;
}

// A product of two rows is summed up by so many lanes, lane l the dims l, l + kScoreLanes, …, and then lanes in halves:
// l and l + kScoreLanes / 2 first.
inline constexpr int kScoreLanes = 32;

// A block's score is the sum over query heads, in ascending order, of what this says of the product of the head's mean
// query and the block's mean key. Another way to choose blocks by means is another function of this type.
struct MeanScore {
  float scale = 1.0F;  // softmax_scale

  RINGATTN_HOST_DEVICE float of_head(float product) const { return product * scale; }
};

// The product on the host: q and k have `dim` numbers.
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

// The order of a block that is taken whatever its score is.
inline constexpr std::uint32_t kAlwaysTaken = 0xffffffffU;
// Scores in their order, as whole numbers: a block of a higher number is taken first. NaN counts as −∞, and −0 as 0. No
// score has the order 0, nor kAlwaysTaken.
RINGATTN_HOST_DEVICE inline std::uint32_t order_of_score(float score) {
  constexpr std::uint32_t kSign = 0x80000000U;
  constexpr std::uint32_t kMin = 0xff800000U;  // −∞
  const std::uint32_t bits = score != score ? kMin : __builtin_bit_cast(std::uint32_t, score + 0.0F);
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// The choice, on the host: `to` receives the numbers of the `count` highest orders, of equal ones those that stand in
// front, ascending and counted from `first`. There are at least `count` orders.
void choose_best(std::span<const std::uint32_t> orders, std::int32_t first, std::int32_t count, std::int32_t* to);

}  // namespace ringattn
