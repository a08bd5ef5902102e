// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm90_mla and sm90_mla_split1k: one launcher per element type (kernels/instances.cmake), and
// one for the FP8 latent cache. Called by sm90_mla.cpp.
#pragma once

#include "base/memory.hpp"
#include "kernels/decode/sm90/compressed_params.hpp"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn::sm90 {

// Kernel arguments of a launch over the FP8 latent cache. All other MLA decode launches get DecodeParams.

struct MlaFp8Params {
  // step.k maps the fp8 values as 16-bit elements, two values each. step.v maps the rotary keys.
  DecodeParams step;
  PagedBytes scales;  // float[4] per row, one scale per 128 latent columns
};

#ifdef __CUDACC__
__device__ __forceinline__ const DecodeParams& step_of(const DecodeParams& params) { return params; }
__device__ __forceinline__ const DecodeParams& step_of(const MlaFp8Params& params) { return params.step; }
#endif

template <class Params>
struct MlaLauncher {
  void (*prepare)();  // as cuda::Launcher
  // Max. co-resident clusters of `ctas` CTAs on the current device, one row block per CTA (mla.cuh).
  int (*max_active_clusters)(int ctas);
  // Enqueues one decode launch on `clusters` such clusters.
  void (*launch)(const Params& params, int ctas, int clusters, Stream stream);
  // The same for clusters whose CTAs share row blocks: 2 CTAs share one (cta_pair.cuh), 3 or 4 share one, 6 or 8 share
  // two (cta_group.cuh). Returns 0 for a cluster size that has no kernel.
  int (*max_active_cta_groups)(int ctas);
  void (*launch_cta_groups)(const Params& params, int ctas, int clusters, Stream stream);
};

extern const MlaLauncher<DecodeParams> mla_bf16;
extern const MlaLauncher<DecodeParams> mla_fp16;
extern const MlaLauncher<MlaFp8Params> mla_fp8;  // queries and outputs are bf16

}  // namespace ringattn::sm90
