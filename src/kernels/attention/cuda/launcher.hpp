// SPDX-License-Identifier: Apache-2.0
// How the host reaches a compiled attention kernel. Each kernel's .cu files define one constant of this type for each
// compiled pair of element type and configuration.
#pragma once

#include "base/memory.hpp"
#include "kernels/attention/cuda/attention_params.hpp"

namespace ringattn::cuda {

struct Launcher {
  // Loads the kernel on the current device, so that no launch has to load it while peers wait. Throws kUnsupported if
  // the kernel was not compiled for the device, or the device's error.
  void (*prepare)();
  // Enqueues attention for all work tiles or gqa_tiles of `params`, of which there is at least one. Throws if the
  // launch fails.
  void (*launch)(const AttentionParams& params, Stream stream);
};

}  // namespace ringattn::cuda
