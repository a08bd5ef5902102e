// SPDX-License-Identifier: Apache-2.0
// Which files are a linear layer's.
#pragma once

#include "io/input_names.hpp"
#include "io/safetensors_file.hpp"

namespace ringattn {

// Whether the file has x and a weight [out_features, in_features]. The weight of causal_conv1d, whose file has the same
// names, is [channels, width], or [channels, 1, width]. A square weight of at most kMaxConv1dWidth channels is
// taken for one of causal_conv1d.
bool holds_linear(const SafetensorsFile& file, const InputNames& names);

}  // namespace ringattn
