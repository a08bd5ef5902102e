// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm90_latent: one for each element type (latent_*.cu).
#pragma once

#include "base/memory.hpp"
#include "kernels/sm90/decode/decode_params.hpp"

namespace ringattn::sm90 {

struct LatentLauncher {
  void (*prepare)();  // as cuda::Launcher
  // Enqueues the step on `ctas` CTAs, with the number of slices that the params say.
  void (*launch)(const DecodeParams& params, int ctas, Stream stream);
};

extern const LatentLauncher latent_bf16;
extern const LatentLauncher latent_fp16;

}  // namespace ringattn::sm90
