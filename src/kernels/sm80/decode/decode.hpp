// SPDX-License-Identifier: Apache-2.0
// The compiled decode kernels of sm80_attention: one for each pair of element type and head dims (decode_*.cu), and one
// for each element type that merges partitions (merge.cu).
#pragma once

#include "base/memory.hpp"
#include "kernels/sm80/decode/decode_params.hpp"

namespace ringattn::sm80 {

struct DecodeLauncher {
  // As cuda::Launcher. Returns how many CTAs a multiprocessor runs at a time.
  int (*prepare)();
  // Enqueues the decode step on `ctas` CTAs. Throws if the launch fails.
  void (*launch)(const DecodeParams& params, int ctas, Stream stream);
};

extern const DecodeLauncher decode_bf16_64;
extern const DecodeLauncher decode_bf16_96;
extern const DecodeLauncher decode_bf16_128;
extern const DecodeLauncher decode_bf16_192;
extern const DecodeLauncher decode_bf16_256;
extern const DecodeLauncher decode_bf16_512;
extern const DecodeLauncher decode_bf16_576;
extern const DecodeLauncher decode_fp16_64;
extern const DecodeLauncher decode_fp16_96;
extern const DecodeLauncher decode_fp16_128;
extern const DecodeLauncher decode_fp16_192;
extern const DecodeLauncher decode_fp16_256;
extern const DecodeLauncher decode_fp16_512;
extern const DecodeLauncher decode_fp16_576;

struct MergeLauncher {
  void (*prepare)();  // as cuda::Launcher
  void (*launch)(const DecodeMergeParams& params, Stream stream);
};

extern const MergeLauncher merge_bf16;
extern const MergeLauncher merge_fp16;

}  // namespace ringattn::sm80
