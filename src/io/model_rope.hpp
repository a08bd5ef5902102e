// SPDX-License-Identifier: Apache-2.0
// The RoPE of a model's layer, from its config.json: rope_parameters (one for all layers, or one per kind of layer), or
// rope_theta, rope_scaling and partial_rotary_factor of older files. The pairs of elements, and the defaults of keys
// that a file omits, depend on the model's class, so an unknown model_type is refused. Source: the configuration and
// modeling files of transformers 5.24.
#pragma once

#include <string>
#include <string_view>

#include "io/model_keys.hpp"

namespace ringattn {

struct ModelRope {
  std::string refusal;  // why it can't be computed; empty: it can be
  std::string type = "default";
  double theta = 10000.0;
  double rotary_factor = 1.0;
  bool interleaved = false;
  // Keys that the file omits, and the values used for them: "has no rope_theta (10000 is the default of llama)"; empty:
  // none.
  std::string assumed;
  std::string scaling;  // the other parameters, "factor=8,low_freq_factor=1"; lists have ':' between their numbers

  bool operator==(const ModelRope&) const = default;
};

// `kind`: the layer's kind, as in layer_types.
ModelRope read_rope(const ModelKeys& keys, std::string_view kind, int head_dim);

}  // namespace ringattn
