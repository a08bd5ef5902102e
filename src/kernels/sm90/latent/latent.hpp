// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm90_latent: one for each element type (latent_*.cu).
#pragma once

#include "base/memory.hpp"
#include "kernels/sm90/decode/decode_params.hpp"

namespace ringattn::sm90 {

struct LatentLauncher {
  void (*prepare)();  // as cuda::Launcher
  // How many clusters for so many blocks of rows and slices the current device holds at a time.
  int (*clusters_at_a_time)(int blocks, int slices);
  // Enqueues the step on `clusters` clusters, each for `blocks` blocks of rows and the slices that the params say.
  void (*launch)(const DecodeParams& params, int blocks, int clusters, Stream stream);
  // The same of pairs of CTAs (pair.cuh), in a form that PairConfig says.
  int (*pairs_at_a_time)();
  void (*launch_pairs)(const DecodeParams& params, bool calls, bool yields, int pairs, Stream stream);
};

extern const LatentLauncher latent_bf16;
extern const LatentLauncher latent_fp16;

}  // namespace ringattn::sm90
