// SPDX-License-Identifier: Apache-2.0
// The weight of a linear layer in a file, unpacked from each format (io/layer_tensors.hpp) to the one form that kernels
// read. pack-quantized values have this form already: the even element is the low half of a byte. GPTQ has the same
// words transposed. AWQ has 8 columns in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7. A zero point is stored unchanged,
// plus 8 (pack-quantized), or minus 1 (GPTQ's checkpoint_format "gptq").
#pragma once

#include <cstdint>
#include <optional>

#include "io/layer_tensors.hpp"
#include "io/quantization_config.hpp"
#include "ops/linear/weight_source.hpp"

namespace ringattn {

class LayerWeights final : public WeightSource {
 public:
  // Checks dtypes and shapes, and reads a GPTQ layer's g_idx. `config` may be missing, except for GPTQ. Throws kFile.
  LayerWeights(LayerTensors tensors, const std::optional<QuantizationConfig>& config);

  const LayerTensors& tensors() const { return tensors_; }
  WeightFormat format() const override { return format_; }
  Dtype dtype() const { return dtype_; }  // kFloat: dtype of the weight; otherwise of its scales
  std::int64_t out_features() const override { return out_features_; }
  std::int64_t in_features() const override { return in_features_; }
  bool has_zeros() const override { return has_zeros_; }

  void read(FeatureRange rows, FeatureRange features, std::byte* data) const override;
  void read_scales(FeatureRange rows, FeatureRange features, float* scales, std::uint8_t* zeros) const override;

 private:
  void check_float();
  void check_int8();
  void check_pack_quantized();
  void check_gptq(const std::optional<QuantizationConfig>& config);
  void check_awq();
  void check_groups(std::int64_t groups) const;
  void read_zeros(FeatureRange rows, FeatureRange groups, std::uint8_t* zeros) const;
  bool transposed() const { return tensors_.format == LayerFormat::kGptq || tensors_.format == LayerFormat::kAwq; }

  LayerTensors tensors_;
  WeightFormat format_ = WeightFormat::kFloat;
  Dtype dtype_ = Dtype::kF32;
  std::int64_t out_features_ = 0;
  std::int64_t in_features_ = 0;
  bool has_zeros_ = false;
  bool zeros_less_one_ = false;
};

}  // namespace ringattn
