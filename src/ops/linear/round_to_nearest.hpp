// SPDX-License-Identifier: Apache-2.0
// Quantizes weights by rounding to nearest, with one symmetric scale per row (INT8) or group (INT4). The scale is that
// of compressed-tensors' min-max observer: amax divided by half the range of the integers, rounded to the dtype in
// which it is stored. Values are divided by the rounded scale and rounded, half to even.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.hpp"
#include "kernels/linear/linear.hpp"

namespace ringattn {

struct RoundingOptions {
  WeightFormat format = WeightFormat::kInt8;
  Dtype scale_dtype = Dtype::kF32;
  // Instead of the min-max scale, uses the multiple of it by 1, 0.99, …, 0.6 whose quantized values have the least sum
  // of squared errors; among equal ones the largest.
  bool search_mse = false;
};

// INT8: −128 … 127. INT4: −8 … 7.
struct RoundedValues {
  float scale = 1.0F;          // 1 if all values are 0
  double squared_error = 0.0;  // Σ (value − scale · integer)²
};

// `values`: the finite values of a row (kInt8) or a group (kInt4). Writes the same number of integers.
RoundedValues round_to_nearest(std::span<const float> values, const RoundingOptions& options, std::int8_t* integers);

// Packs a row's integers for the kernels: kInt4 has two values plus 8 in a byte, the even one in the low half.
void pack_integers(std::span<const std::int8_t> integers, WeightFormat format, std::byte* packed);

// Quantizes a row: kInt4 in groups of kInt4Group, which must divide it. `packed` and `scales` are as in LinearMatrix.
// Returns the sum of squared errors. `integers`: scratch for the same number of values.
double quantize_row(std::span<const float> row, const RoundingOptions& options, std::span<std::int8_t> integers,
                    std::byte* packed, float* scales);

}  // namespace ringattn
