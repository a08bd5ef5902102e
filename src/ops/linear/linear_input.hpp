// SPDX-License-Identifier: Apache-2.0
// The layer of a `linear` job: its weight and bias, from a file or a seed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/input_names.hpp"
#include "io/safetensors_file.hpp"
#include "ops/linear/layer_weights.hpp"
#include "ops/linear/weight_source.hpp"

namespace ringattn {

// Whether the file has x and a layer, or x without the tensor that `names` calls weight, which is then in a model
// (--model). A file of causal_conv1d has the same names, with a weight [channels, width] or [channels, 1, width]. A
// square weight of 2 to kMaxConv1dWidth channels counts as one of causal_conv1d.
bool holds_linear(const SafetensorsFile& file, const InputNames& names);
// Whether the file has such a square weight, and may belong to either op.
bool holds_square_linear(const SafetensorsFile& file, const InputNames& names);

// One weight or, for a gated layer, one or two (the gate first), each with its bias.
struct LinearInput {
  struct Matrix {
    std::unique_ptr<const WeightSource> weight;
    std::optional<TensorSource> bias;  // [rows of the weight]
  };
  std::vector<Matrix> matrices;
  std::vector<TensorSource> sources;  // in the file
  std::string format;                 // of a quantized file: "pack-quantized", "gptq_v2"; otherwise empty

  std::int64_t out_features() const;  // rows of all weights together
};

// The layer that `names` selects. Without a name: the tensors without a prefix, or the only layer in the file that fits
// x. `config`: the value of --quantization-config. Throws kFile, and kUsage for an up matrix of a layer without a gate.
LinearInput find_linear(const SafetensorsFile& file, const TensorSource& x, const InputNames& names, bool gated,
                        const std::string& config);

}  // namespace ringattn
