// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/linear_oracle.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>

namespace ringattn {

namespace {

float rounded(float value, Dtype dtype) {
  std::byte bytes[sizeof(float)];
  store_element(bytes, dtype, value);
  return load_element(bytes, dtype);
}

double activated(double z, LinearActivation activation) {
  switch (activation) {
    case LinearActivation::kNone:
      return z;
    case LinearActivation::kSilu:
      return z / (1.0 + std::exp(-z));
    case LinearActivation::kGelu:
      return z * 0.5 * std::erfc(-z / std::numbers::sqrt2);
    case LinearActivation::kGeluTanh: {
      const double u = std::sqrt(2.0 / std::numbers::pi) * (z + 0.044715 * z * z * z);
      return z * (1.0 / (1.0 + std::exp(-2.0 * u)));
    }
  }
  return z;
}

// The row of x that is multiplied: its values, or quantized integers with a scale.
struct OracleInput {
  std::vector<double> values;
  double scale = 1.0;
};

OracleInput read_row(const LinearSpec& spec, const TensorView& x, std::int64_t row) {
  OracleInput input;
  std::vector<float> values;
  for (std::int64_t k = 0; k < spec.in_features; ++k) {
    values.push_back(load_element(x.at(row, 0) + static_cast<std::size_t>(k) * size_of(x.dtype), x.dtype));
  }
  input.values.assign(values.begin(), values.end());
  if (spec.weights != WeightFormat::kInt8) return input;
  float absmax = 0.0F;
  for (const float value : values) {
    if (!std::isfinite(value)) input.scale = std::numeric_limits<double>::quiet_NaN();
    absmax = std::max(absmax, std::fabs(value));
  }
  if (std::isnan(input.scale)) {
    std::ranges::fill(input.values, 0.0);
    return input;
  }
  const float scale = absmax / 127.0F == 0.0F ? 1.0F : absmax / 127.0F;
  for (std::size_t k = 0; k < values.size(); ++k) {
    input.values[k] = std::clamp(static_cast<double>(std::rint(values[k] / scale)), -127.0, 127.0);
  }
  input.scale = scale;
  return input;
}

// kInt4: without its scale if exact.
double weight_at(const LinearSpec& spec, const LinearMatrix& matrix, std::int64_t n, std::int64_t k,
                 Int4Meaning meaning) {
  const auto* const row = static_cast<const std::byte*>(matrix.data) + n * matrix.row_stride;
  switch (spec.weights) {
    case WeightFormat::kFloat:
      return load_element(row + static_cast<std::size_t>(k) * size_of(spec.dtype), spec.dtype);
    case WeightFormat::kInt8:
      return static_cast<double>(static_cast<signed char>(row[k]));
    case WeightFormat::kInt4: {
      const int both = std::to_integer<int>(row[k / 2]);
      const std::int64_t group = n * matrix.group_stride + k / kInt4Group;
      const int q = (k % 2 == 0 ? both % 16 : both / 16) - (matrix.zeros == nullptr ? 8 : matrix.zeros[group]);
      const float scale = matrix.scales[group];
      if (meaning == Int4Meaning::kDequantized) return rounded(static_cast<float>(q) * scale, spec.dtype);
      return q;
    }
  }
  return 0.0;
}

// z of a column and its error.
struct OracleSum {
  double value = 0.0;
  double error = 0.0;
};

OracleSum sum_of(const LinearSpec& spec, const LinearMatrix& matrix, const OracleInput& input, std::int64_t n,
                 Int4Meaning meaning) {
  double sum = 0.0;
  double size = 0.0;
  double group = 0.0;  // kInt4: not scaled
  const bool scales_groups = spec.weights == WeightFormat::kInt4 && meaning == Int4Meaning::kExact;
  for (std::int64_t k = 0; k < spec.in_features; ++k) {
    const double product = input.values[static_cast<std::size_t>(k)] * weight_at(spec, matrix, n, k, meaning);
    const double scale = scales_groups ? matrix.scales[n * matrix.group_stride + k / kInt4Group] : 1.0;
    group += product;
    size += std::fabs(product * scale);
    if (scales_groups && (k + 1) % kInt4Group != 0) continue;
    sum += group * scale;
    group = 0.0;
  }
  const bool integers = spec.weights == WeightFormat::kInt8;
  if (integers) sum *= input.scale * matrix.scales[n];
  double bias = 0.0;
  if (spec.bias) {
    bias = load_element(static_cast<const std::byte*>(matrix.bias) + static_cast<std::size_t>(n) * size_of(spec.dtype),
                        spec.dtype);
  }
  // fp32 sums of K products in any order; int8 has four roundings after its exact sum.
  const double roundings = integers ? 4.0 * std::fabs(sum) : static_cast<double>(spec.in_features + 8) * size;
  return {sum + bias, 0x1p-24 * (roundings + std::fabs(sum) + std::fabs(bias))};
}

}  // namespace

LinearOracleRow linear_oracle(const LinearSpec& spec, const LinearWeights& weights, const TensorView& x,
                              std::int64_t row, Int4Meaning meaning) {
  const OracleInput input = read_row(spec, x, row);
  const double rounding = spec.dtype == Dtype::kBf16 ? 0x1p-8 : spec.dtype == Dtype::kF16 ? 0x1p-11 : 0x1p-24;
  const double smallest = spec.dtype == Dtype::kF16 ? 0x1p-24 : 0x1p-126;  // half a step of subnormal values, or more
  LinearOracleRow result;
  for (std::int64_t n = 0; n < spec.out_features; ++n) {
    const OracleSum z = sum_of(spec, weights.matrix, input, n, meaning);
    double y = activated(z.value, spec.activation);
    double error = z.error;
    // No activation is steeper than 1.13. exp2, the reciprocal and their arguments err by a few units in fp32.
    if (spec.activation != LinearActivation::kNone) error = 1.13 * error + 0x1p-20 * std::fabs(z.value);
    if (spec.gated) {
      const OracleSum up = sum_of(spec, weights.up, input, n, meaning);
      error = error * (std::fabs(up.value) + up.error) + std::fabs(y) * up.error + 0x1p-24 * std::fabs(y * up.value);
      y *= up.value;
    }
    result.y.push_back(y);
    result.allowed.push_back(error + rounding * (std::fabs(y) + error) + smallest);
  }
  return result;
}

}  // namespace ringattn
