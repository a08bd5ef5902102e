// SPDX-License-Identifier: Apache-2.0
// AttentionSpecs with the usual defaults.
#pragma once

#include <cmath>

#include "kernels/attention/attention.hpp"

namespace ringattn {

// 1/√head_dim, which keeps scores of normally distributed queries and keys near 1.
inline float default_softmax_scale(int head_dim) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

// Default softmax scale, no softcap, no sinks. head_dim_v 0: equal to head_dim.
inline AttentionSpec make_spec(Dtype dtype, int heads, int kv_heads, int head_dim, const Mask& mask,
                               int head_dim_v = 0) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.heads = heads;
  spec.kv_heads = kv_heads;
  spec.head_dim = head_dim;
  spec.head_dim_v = head_dim_v > 0 ? head_dim_v : head_dim;
  spec.mask = mask;
  spec.softmax_scale = default_softmax_scale(head_dim);
  return spec;
}

}  // namespace ringattn
