// SPDX-License-Identifier: Apache-2.0
// How the host reaches a compiled fold kernel. Each kernel's .cu files define constants of this type, one for each pair
// of element type and configuration that is compiled.
#pragma once

#include "base/memory.hpp"
#include "kernels/cuda/attention_params.hpp"

namespace ringattn::cuda {

struct Launcher {
  // Makes the kernel ready on the current device, so that no launch has to load it while peers wait. Throws
  // kUnsupported where the device is not what the kernel was compiled for, and what else the device fails with.
  void (*prepare)();
  // Enqueues the fold of all work_tiles or gqa_tiles of `params`, of which there is at least one. Throws what the
  // launch fails with.
  void (*launch)(const AttentionParams& params, Stream stream);
};

}  // namespace ringattn::cuda
