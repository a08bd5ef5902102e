// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm90_mla and sm90_mla_split1k: one launcher per element type (kernels/instances.cmake), and
// one for the FP8 latent cache. Called by sm90_mla.cpp.
#pragma once

#include "base/memory.hpp"
#include "kernels/decode/sm90/decode_params.hpp"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn::sm90 {

// Kernel parameters of MLA decode.
struct MlaParams : WorkTileParams {
  CUtensorMap k;                 // the latent cache, in boxes of 64 columns
  std::int32_t split_tiles_log;  // log2 of the key tiles of a KV split
  // For a launch in which one CTA may attend to all splits of a row and finish it, although there are partials
  // (mla.cuh): it writes 1 or 0 here for the merge that follows. Null: it doesn't.
  std::int32_t* whole;
};

// Over the FP8 latent cache. `k` maps the fp8 values as 16-bit elements, two values each.
struct MlaFp8Params : MlaParams {
  CUtensorMap rope;   // the rotary keys
  PagedBytes scales;  // float[4] per row, one scale per 128 latent columns
};

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

extern const MlaLauncher<MlaParams> mla_bf16;
extern const MlaLauncher<MlaParams> mla_fp16;
extern const MlaLauncher<MlaFp8Params> mla_fp8;  // queries and outputs are bf16

}  // namespace ringattn::sm90
