// SPDX-License-Identifier: Apache-2.0
// The gradients of activations on GPUs (LinearGradientTask), and how the host reaches them.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "kernels/linear/linear_constants.hpp"

namespace ringattn::cuda {

// Strides count elements. Gated: z and dz have the columns of the gate, then those of the up matrix.
struct ActivationGradientParams {
  Dtype dtype;
  LinearActivation activation;
  bool gated;
  std::int64_t rows;
  std::int64_t columns;  // of dy
  const void* dy;
  std::int64_t dy_stride;
  const void* z;
  std::int64_t z_stride;
  void* dz;  // may be z
  std::int64_t dz_stride;
};

// Loads the kernels on the current device, so that no task has to load them while peers wait.
void prepare_activation_gradient();
// Enqueues on the current device.
void launch_activation_gradient(const ActivationGradientParams& params, Stream stream);

}  // namespace ringattn::cuda
