// SPDX-License-Identifier: Apache-2.0
// Quantizes the linear layers of a model's file by rounding to nearest (round_to_nearest.hpp), and writes a folder in
// the format of compressed-tensors: model.safetensors, and config.json with its quantization_config.
//
// A layer is a matrix NAME.weight of F32, BF16 or F16. Not quantized: embeddings (a last name with "embed", or wte,
// wpe, shared, relative_attention_bias), routers (gate, router), filters (conv1d), layers that are ignored, and all
// other tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/linear/linear.hpp"

namespace ringattn {

struct QuantizeJob {
  std::string input;     // a safetensors file, its index, or a folder with model.safetensors or its index
  std::string output;    // a folder
  bool replace = false;  // an earlier output may be replaced
  WeightFormat format = WeightFormat::kInt8;
  bool search_mse = false;
  // Names of layers, whole or only their end after a dot ("lm_head", "mlp.down_proj"), or "re:" and a regular
  // expression.
  std::vector<std::string> ignore;
  int threads = 1;
};

struct QuantizedLayer {
  std::string name;
  std::int64_t out_features = 0;
  std::int64_t in_features = 0;
  std::int64_t bytes_before = 0;
  std::int64_t bytes_after = 0;  // values and scales
  double relative_error = 0.0;   // ‖W − dequantized‖ / ‖W‖; 0 for a layer of zeros
};

struct QuantizeResult {
  std::vector<QuantizedLayer> layers;  // ascending by name
  std::vector<std::string> left;       // matrices that were not quantized, by their layers' names
  std::vector<std::string> copied;     // other files of the input's folder
  std::int64_t bytes_before = 0;       // of all tensors
  std::int64_t bytes_after = 0;
};

// Name of a WeightFormat in compressed-tensors: "int-quantized", "pack-quantized".
std::string_view compressed_format(WeightFormat format);

// Throws kFile if the output can't be written.
void check_quantize_output(const std::string& path, bool replace);

// Throws kFile for an input that can't be read, is already quantized or has no such layers, for NaN and infinite
// weights, naming the layer, and for int4 layers whose features are not whole groups; kUsage for a name to ignore that
// no layer has. With `replace`, throws kFile if the output is a folder whose config.json is not of compressed-tensors.
// The output appears complete or not at all.
QuantizeResult quantize_model(const QuantizeJob& job);

}  // namespace ringattn
