// SPDX-License-Identifier: Apache-2.0
// The fp64 oracle of linear layers: the formulas of linear.hpp, one element at a time, sharing no code with the
// kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/linear/linear.hpp"

namespace ringattn {

struct LinearOracleRow {
  std::vector<double> y;        // [N]
  std::vector<double> allowed;  // [N]: maximum error of a kernel's value, including its rounding to the dtype
};

// How an int4 weight is dequantized. kDequantized is what other systems compute: scale · (q − zero) is rounded to the
// dtype before it is multiplied.
enum class Int4Meaning { kExact, kDequantized };

// Row `row` of x, in host memory. kInt8: x is quantized as linear.hpp says, in fp32; sums are integers.
LinearOracleRow linear_oracle(const LinearSpec& spec, const LinearWeights& weights, const TensorView& x,
                              std::int64_t row, Int4Meaning meaning = Int4Meaning::kExact);

}  // namespace ringattn
