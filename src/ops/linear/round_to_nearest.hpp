// SPDX-License-Identifier: Apache-2.0
// Quantization of weights by rounding to nearest: one symmetric scale for a row (INT8) or a group (INT4). The scale is
// that of compressed-tensors' min-max observer: amax divided by half the range of the integers, rounded to the dtype
// that it is stored in. Values are rounded relative to the rounded scale, half to even.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.hpp"
#include "kernels/linear/linear.hpp"

namespace ringattn {

struct RoundingOptions {
  WeightFormat format = WeightFormat::kInt8;
  Dtype scale_dtype = Dtype::kF32;
  // Instead of the min-max scale, the one of it times 1, 0.99, …, 0.6 whose quantized values have the least sum of
  // squared errors; of equal ones the largest.
  bool search_mse = false;
};

// INT8: −128 … 127. INT4: −8 … 7.
struct RoundedValues {
  float scale = 1.0F;          // 1 where all values are 0
  double squared_error = 0.0;  // Σ (value − scale · integer)²
};

// `values`: finite, of a row (kInt8) or a group (kInt4). As many integers are written.
RoundedValues round_to_nearest(std::span<const float> values, const RoundingOptions& options, std::int8_t* integers);

// Integers of a row as kernels have them: two values of kInt4 in a byte, plus 8, the even one in the low half.
void pack_integers(std::span<const std::int8_t> integers, WeightFormat format, std::byte* packed);

// Quantizes a row: kInt4 in groups of kInt4Group, into which it must divide. `packed` and `scales` are as LinearMatrix
// has them. Returns the sum of squared errors. `integers`: room for as many values.
double quantize_row(std::span<const float> row, const RoundingOptions& options, std::span<std::int8_t> integers,
                    std::byte* packed, float* scales);

}  // namespace ringattn
