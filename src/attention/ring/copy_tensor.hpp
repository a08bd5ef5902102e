// SPDX-License-Identifier: Apache-2.0
// Copies tensors between any strides.
#pragma once

#include "base/tensor.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

// Copies `source`, [tokens, heads, dim], to `target` of the same shape and dtype. A source [tokens, 1, dim] is copied
// to every head of `target`. Ordered on `stream`.
void copy_tensor(Backend& backend, const MutableTensorView& target, const TensorView& source, Stream stream);

}  // namespace ringattn
