// SPDX-License-Identifier: Apache-2.0
// The compiled decode kernels of sm90_attention: one for each pair of element type and head dims (decode_*.cu).
#pragma once

#include "base/memory.hpp"
#include "kernels/sm90/decode/decode_params.hpp"

namespace ringattn::sm90 {

struct DecodeLauncher {
  void (*prepare)();  // as cuda::Launcher
  // Enqueues the step on `ctas` CTAs, a warpgroup's 64 rows a block (decode.cuh). What the params say of the cache is
  // filled in already.
  void (*launch)(const DecodeParams& params, int ctas, Stream stream);
  // The same with few rows a block, in clusters of params.slices CTAs (sliced.cuh), `clusters` of them.
  void (*launch_sliced)(const DecodeParams& params, int clusters, Stream stream);
  // Enqueues the tiles of the step's shared prefixes (prefix.cuh), in front of one of the launches above.
  void (*launch_prefixes)(const DecodeParams& params, int ctas, Stream stream);
  // The same by pairs of CTAs, so many. Values come by boxes of kPanelColumns columns then.
  void (*launch_prefix_cta_pairs)(const DecodeParams& params, int pairs, Stream stream);
  // How many clusters of so many slices the current device holds at a time; 0: there is no such kernel.
  int (*clusters_at_a_time)(int slices);
  int (*prefix_cta_pairs_at_a_time)();  // and how many pairs for prefixes
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
