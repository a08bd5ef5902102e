// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/round_to_nearest.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

namespace ringattn {

namespace {

constexpr int kSearchSteps = 40;  // steps of 1 %

struct IntegerRange {
  float least;
  float most;

  float half() const { return (most - least) / 2.0F; }
};

IntegerRange range_of(WeightFormat format) {
  return format == WeightFormat::kInt8 ? IntegerRange{-128.0F, 127.0F} : IntegerRange{-8.0F, 7.0F};
}

// The scale after rounding to its dtype. One that would become 0 is replaced by the smallest number of the dtype.
float stored_scale(float scale, Dtype dtype) {
  std::byte bytes[sizeof(float)];
  store_element(bytes, dtype, scale);
  const float stored = load_element(bytes, dtype);
  if (stored > 0.0F) return stored;
  return dtype == Dtype::kF16 ? 0x1p-24F : dtype == Dtype::kBf16 ? 0x1p-133F : std::numeric_limits<float>::denorm_min();
}

float rounded_integer(float value, float scale, IntegerRange range) {
  return std::clamp(std::nearbyint(value / scale), range.least, range.most);
}

double error_of(std::span<const float> values, float scale, IntegerRange range) {
  double sum = 0.0;
  for (const float value : values) {
    const float integer = rounded_integer(value, scale, range);
    const double error = static_cast<double>(value) - static_cast<double>(scale) * static_cast<double>(integer);
    sum += error * error;
  }
  return sum;
}

}  // namespace

RoundedValues round_to_nearest(std::span<const float> values, const RoundingOptions& options, std::int8_t* integers) {
  const IntegerRange range = range_of(options.format);
  float absmax = 0.0F;
  for (const float value : values) absmax = std::max(absmax, std::fabs(value));
  RoundedValues rounded;
  if (absmax == 0.0F) {
    std::fill_n(integers, values.size(), std::int8_t{0});
    return rounded;
  }
  const float greatest = absmax / range.half();
  rounded.scale = stored_scale(greatest, options.scale_dtype);
  rounded.squared_error = error_of(values, rounded.scale, range);
  for (int step = 1; options.search_mse && step <= kSearchSteps; ++step) {
    const float scale = stored_scale(greatest * (1.0F - 0.01F * static_cast<float>(step)), options.scale_dtype);
    const double error = error_of(values, scale, range);
    if (error < rounded.squared_error) rounded = {scale, error};
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    integers[i] = static_cast<std::int8_t>(rounded_integer(values[i], rounded.scale, range));
  }
  return rounded;
}

void pack_integers(std::span<const std::int8_t> integers, WeightFormat format, std::byte* packed) {
  if (format == WeightFormat::kInt8) {
    std::memcpy(packed, integers.data(), integers.size());
    return;
  }
  for (std::size_t i = 0; i + 1 < integers.size(); i += 2) {
    packed[i / 2] = static_cast<std::byte>((integers[i] + 8) | (integers[i + 1] + 8) << 4);
  }
}

double quantize_row(std::span<const float> row, const RoundingOptions& options, std::span<std::int8_t> integers,
                    std::byte* packed, float* scales) {
  const std::size_t group = options.format == WeightFormat::kInt4 ? static_cast<std::size_t>(kInt4Group)
                                                                  : std::max<std::size_t>(1, row.size());
  double error = 0.0;
  for (std::size_t begin = 0; begin < row.size(); begin += group) {
    const RoundedValues rounded = round_to_nearest(row.subspan(begin, group), options, integers.data() + begin);
    *scales++ = rounded.scale;
    error += rounded.squared_error;
  }
  pack_integers(integers.first(row.size()), options.format, packed);
  return error;
}

}  // namespace ringattn
