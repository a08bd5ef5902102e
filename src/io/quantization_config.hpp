// SPDX-License-Identifier: Apache-2.0
// What a model's config.json says of its quantized layers, in "quantization_config", or the quantize_config.json of
// older GPTQ files. Tensors have all shapes; the config has what they don't say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "io/layer_tensors.hpp"

namespace ringattn {

enum class QuantMethod : std::uint8_t { kCompressedTensors, kGptq, kAwq };

struct QuantizationConfig {
  std::string path;
  QuantMethod method = QuantMethod::kCompressedTensors;
  bool zeros_less_one = false;  // kGptq: checkpoint_format "gptq", not "gptq_v2", stores a zero less one

  // Throws kFile for a layer whose tensors are of another method.
  void check(const LayerTensors& layer) const;
};

// Nothing where the text has no quantization. Throws kFile for a malformed one, and, by name, for methods, bit widths,
// group sizes, activation ordering and activations that are not computed with. `path` stands for the file in messages.
std::optional<QuantizationConfig> parse_quantization_config(std::string_view text, const std::string& path);
// Reads the file. Throws kFile where there is none.
std::optional<QuantizationConfig> read_quantization_config(const std::string& path);
// Reads the config.json in the folder of a file. Nothing where there is none.
std::optional<QuantizationConfig> quantization_config_beside(const std::string& path);

}  // namespace ringattn
