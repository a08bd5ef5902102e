// SPDX-License-Identifier: Apache-2.0
// Copies between tensors of any strides.
#pragma once

#include "base/tensor.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

// Copies `source`, [tokens, heads, dim], to `target` of the same shape and dtype, or one head of it to every head of
// `target`: [tokens, 1, dim]. Ordered on `stream`.
void copy_tensor(Backend& backend, const MutableTensorView& target, const TensorView& source, Stream stream);

}  // namespace ringattn
