// SPDX-License-Identifier: Apache-2.0
// The compiled decode kernels of sm90_attention: one for each element type and head dims (kernels/instances.cmake).
#pragma once

#include "base/memory.hpp"
#include "kernels/decode/sm90/decode_params.hpp"

namespace ringattn::sm90 {

struct DecodeLauncher {
  void (*prepare)();  // see cuda::Launcher
  // Enqueues the step on `ctas` CTAs, with row blocks of 64 rows, a warpgroup's M (decode.cuh). The cache fields of
  // params are set already.
  void (*launch)(const DecodeParams& params, int ctas, Stream stream);
  // The same with row blocks of up to 16 rows, on `clusters` clusters of params.slices CTAs (sliced.cuh).
  void (*launch_sliced)(const SlicedParams& params, int clusters, Stream stream);
  // Enqueues the tiles of the step's shared prefixes (prefix.cuh), before one of the launches above.
  void (*launch_prefixes)(const PrefixParams& params, int ctas, Stream stream);
  // The same on `pairs` CTA pairs. The map of V then has boxes of kPanelColumns columns.
  void (*launch_prefix_cta_pairs)(const PrefixParams& params, int pairs, Stream stream);
  // How many clusters of `slices` CTAs are resident on the current device at a time; 0: no kernel is compiled for
  // `slices`.
  int (*clusters_at_a_time)(int slices);
  int (*prefix_cta_pairs_at_a_time)();  // the same for CTA pairs of the prefix kernel
};

extern const DecodeLauncher decode_bf16_64;
extern const DecodeLauncher decode_bf16_96;
extern const DecodeLauncher decode_bf16_128;
extern const DecodeLauncher decode_bf16_192;
extern const DecodeLauncher decode_bf16_256;
extern const DecodeLauncher decode_fp16_64;
extern const DecodeLauncher decode_fp16_96;
extern const DecodeLauncher decode_fp16_128;
extern const DecodeLauncher decode_fp16_192;
extern const DecodeLauncher decode_fp16_256;

}  // namespace ringattn::sm90
