// SPDX-License-Identifier: Apache-2.0
// The source of a linear layer's weight: a file (layer_weights.hpp) or a seed. Any part can be read in the form that
// kernels take (LinearMatrix), so a rank reads only its own part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/linear/linear.hpp"
#include "ops/linear/linear.hpp"

namespace ringattn {

// The host memory of a part, [rows, features].
struct WeightPart {
  std::byte* data = nullptr;      // rows of weight_row_bytes() bytes
  float* scales = nullptr;        // kInt8: [rows]; kInt4: [rows, features / kInt4Group]
  std::uint8_t* zeros = nullptr;  // kInt4, if has_zeros(): as scales
};

class WeightSource {
 public:
  virtual ~WeightSource() = default;

  virtual WeightFormat format() const = 0;
  virtual std::int64_t out_features() const = 0;  // rows; of a stacked gated layer those of both matrices
  virtual std::int64_t in_features() const = 0;
  virtual bool has_zeros() const { return false; }

  // Reads the values of a part. kInt4: `features` are whole groups. Throws kFile.
  virtual void read(FeatureRange rows, FeatureRange features, std::byte* data) const = 0;
  // Reads the scales and zeros of a part. Throws kFile for a scale that is NaN, infinite or negative.
  virtual void read_scales(FeatureRange rows, FeatureRange features, float* scales, std::uint8_t* zeros) const = 0;
};

// Bytes of `features` values of a row. `dtype`: for kFloat.
constexpr std::int64_t weight_row_bytes(WeightFormat format, Dtype dtype, std::int64_t features) {
  if (format == WeightFormat::kFloat) return features * static_cast<std::int64_t>(size_of(dtype));
  return format == WeightFormat::kInt8 ? features : features / 2;
}
// Number of scales (and of zeros, if there are any) for `features` features of a row.
constexpr std::int64_t row_scales(WeightFormat format, std::int64_t features) {
  if (format == WeightFormat::kFloat) return 0;
  return format == WeightFormat::kInt8 ? 1 : features / kInt4Group;
}

}  // namespace ringattn
