// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm90_latent and sm90_latent_1k: one for each element type (latent_*.cu), and one for latents
// of 8 bits.
#pragma once

#include "base/memory.hpp"
#include "kernels/sm90/latent/latent_params.hpp"

namespace ringattn::sm90 {

template <class Params>
struct LatentLauncher {
  void (*prepare)();  // as cuda::Launcher
  // How many clusters of so many CTAs, each with a block of rows, the current device holds at a time.
  int (*clusters_at_a_time)(int ctas);
  // Enqueues the step on so many of them.
  void (*launch)(const Params& params, int ctas, int clusters, Stream stream);
  // The same of clusters whose CTAs share blocks of rows: two of them one (pair.cuh), four one, or eight two
  // (team.cuh). No cluster of a size that there isn't is held.
  int (*sharing_at_a_time)(int ctas);
  void (*launch_sharing)(const Params& params, int ctas, int clusters, Stream stream);
};

extern const LatentLauncher<DecodeParams> latent_bf16;
extern const LatentLauncher<DecodeParams> latent_fp16;
extern const LatentLauncher<LatentCodeParams> latent_codes;  // become bf16

}  // namespace ringattn::sm90
