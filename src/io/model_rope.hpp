// SPDX-License-Identifier: Apache-2.0
// The RoPE of a model's layer by its config.json: rope_parameters (one for all layers, or one by kind of layer), or
// rope_theta, rope_scaling and partial_rotary_factor of older files. Which elements are pairs, and the defaults of keys
// that a file leaves out, belong to the model's class, so a model_type that is not known here is refused. Source: the
// configuration and modeling files of transformers 5.24.
#pragma once

#include <string>
#include <string_view>

#include "io/model_keys.hpp"

namespace ringattn {

struct ModelRope {
  std::string refusal;  // why it can't be computed; empty: it can
  std::string type = "default";
  double theta = 10000.0;
  double rotary_factor = 1.0;
  bool interleaved = false;
  // What the file leaves out and how it is read, "has no rope_theta (10000 is the default of llama)"; empty: nothing.
  std::string assumed;
  std::string scaling;  // the other parameters, "factor=8,low_freq_factor=1"; lists have ':' between their numbers

  bool operator==(const ModelRope&) const = default;
};

// `kind`: the layer's, as layer_types names it.
ModelRope read_rope(const ModelKeys& keys, std::string_view kind, int head_dim);

}  // namespace ringattn
