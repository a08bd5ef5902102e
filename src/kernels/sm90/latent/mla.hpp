// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm90_mla and sm90_mla_split1k: one for each element type (latent_*.cu), and one for latents
// of 8 bits.
#pragma once

#include "base/memory.hpp"
#include "kernels/sm90/latent/mla_params.hpp"

namespace ringattn::sm90 {

template <class Params>
struct MlaLauncher {
  void (*prepare)();  // as cuda::Launcher
  // How many clusters of so many CTAs, each with a block of rows, the current device holds at a time.
  int (*clusters_at_a_time)(int ctas);
  // Enqueues the step on so many of them.
  void (*launch)(const Params& params, int ctas, int clusters, Stream stream);
  // The same of clusters whose CTAs share blocks of rows: two of them one (cta_pair.cuh), four one, or eight two
  // (cta_group.cuh). No cluster of a size that there isn't is held.
  int (*cta_groups_at_a_time)(int ctas);
  void (*launch_cta_groups)(const Params& params, int ctas, int clusters, Stream stream);
};

extern const MlaLauncher<DecodeParams> mla_bf16;
extern const MlaLauncher<DecodeParams> mla_fp16;
extern const MlaLauncher<MlaFp8Params> mla_fp8;  // become bf16

}  // namespace ringattn::sm90
