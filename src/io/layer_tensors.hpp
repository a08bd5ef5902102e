// SPDX-License-Identifier: Apache-2.0
// The tensors of a linear layer in a file, by the names that each format gives them. N out_features, K in_features:
//
//   float           weight [N, K]
//   int-quantized   weight I8 [N, K], weight_scale [N, 1]                                     (compressed-tensors)
//   pack-quantized  weight_packed I32 [N, K / 8], weight_scale [N, K / 128], weight_shape [2],
//                   asymmetric weight_zero_point I32 [N / 8, K / 128]                         (compressed-tensors)
//   gptq            qweight I32 [K / 8, N], qzeros I32 [K / 128, N / 8], scales [K / 128, N], g_idx I32 [K]
//   awq             qweight I32 [K, N / 8], qzeros I32 [K / 128, N / 8], scales [K / 128, N]
//
// A bias [N] may stand beside any of them. ops/linear/layer_weights.hpp checks shapes and unpacks values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors_file.hpp"

namespace ringattn {

// Returns `path`, or the model.safetensors.index.json or model.safetensors in it if it is a model's folder. Throws
// kFile.
std::string weights_file(const std::string& path);

enum class LayerFormat : std::uint8_t { kFloat, kIntQuantized, kPackQuantized, kGptq, kAwq };
std::string_view layer_format_name(LayerFormat format);  // as above

// Valid as long as the file.
struct LayerTensors {
  std::string name;  // "model.layers.0.mlp.down_proj"; empty: its tensors have no prefix
  LayerFormat format = LayerFormat::kFloat;
  TensorSource weight;  // weight, weight_packed or qweight
  std::optional<TensorSource> scales, zeros, shape, group_index, bias;

  std::string text() const;                   // "layer `model.layers.0.mlp.down_proj`", "the layer", for messages
  std::vector<TensorSource> sources() const;  // all tensors that are read
};

// The names of a file's layers, ascending: the prefixes of .weight [N, K], .weight_packed and .qweight.
std::vector<std::string> layer_names(const SafetensorsFile& file);
// Whether the file has a layer `name`.
bool has_layer(const SafetensorsFile& file, std::string_view name);

// `name`: a layer, or its tensor weight, weight_packed or qweight. Throws kFile, naming the tensor, if the layer lacks
// a tensor, if it has one that would change its result and is not read, or if its format is not supported, such as
// bitsandbytes or torchao.
LayerTensors find_layer(const SafetensorsFile& file, std::string_view name);

}  // namespace ringattn
