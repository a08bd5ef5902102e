// SPDX-License-Identifier: Apache-2.0
// The weight of a synthetic linear layer. Quantized formats are made from the floating-point values of the same seed.
#pragma once

#include <cstdint>

#include "ops/linear/weight_source.hpp"

namespace ringattn {

class SyntheticWeights final : public WeightSource {
 public:
  // `dtype`: dtype of the weights, also before they are quantized.
  SyntheticWeights(std::uint64_t seed, WeightFormat format, Dtype dtype, std::int64_t out_features,
                   std::int64_t in_features)
      : seed_(seed), format_(format), dtype_(dtype), out_features_(out_features), in_features_(in_features) {}

  WeightFormat format() const override { return format_; }
  std::int64_t out_features() const override { return out_features_; }
  std::int64_t in_features() const override { return in_features_; }

  void read(FeatureRange rows, FeatureRange features, std::byte* data) const override;
  void read_scales(FeatureRange rows, FeatureRange features, float* scales, std::uint8_t* zeros) const override;

 private:
  // Quantizes the part; either target may be null.
  void quantize(FeatureRange rows, FeatureRange features, std::byte* data, float* scales) const;

  std::uint64_t seed_;
  WeightFormat format_;
  Dtype dtype_;
  std::int64_t out_features_;
  std::int64_t in_features_;
};

}  // namespace ringattn
