// SPDX-License-Identifier: Apache-2.0
// The quantization of a model's layers: "quantization_config" in its config.json, or the quantize_config.json of older
// GPTQ files. Shapes are those of the tensors; the config adds what tensors don't determine.
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
  bool zeros_less_one = false;  // kGptq: true if checkpoint_format is "gptq", not "gptq_v2": zeros are stored minus one

  // Throws kFile if the layer's tensors belong to another method.
  void check(const LayerTensors& layer) const;
};

// Nothing if the text has no quantization. Throws kFile if it is malformed, and, with their names, for methods, bit
// widths, group sizes, activation ordering and activations that are not supported. `path` stands for the file in
// messages.
std::optional<QuantizationConfig> parse_quantization_config(std::string_view text, const std::string& path);
// Reads the file. Throws kFile if it does not exist.
std::optional<QuantizationConfig> read_quantization_config(const std::string& path);
// Reads the config.json in the folder of a file. Returns nothing if there is none.
std::optional<QuantizationConfig> quantization_config_beside(const std::string& path);

}  // namespace ringattn
