// SPDX-License-Identifier: Apache-2.0
// The compiled decode kernels of sm80_attention: one for each element type and head dim of K (kernels/instances.cmake),
// and for each element type one that merges partitions (merge.cu). 192 stands for head dims 192/128, 576 for 576/512.
#pragma once

#include "base/memory.hpp"
#include "kernels/decode/sm80/decode_params.hpp"

namespace ringattn::sm80 {

struct DecodeLauncher {
  // Loads the kernel, as cuda::Launcher::prepare() does. Returns how many CTAs run on a multiprocessor at a time.
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
  void (*prepare)();  // as cuda::Launcher::prepare()
  // Enqueues the merge of the partitions' partials. Throws if the launch fails.
  void (*launch)(const DecodeMergeParams& params, Stream stream);
};

extern const MergeLauncher merge_bf16;
extern const MergeLauncher merge_fp16;

}  // namespace ringattn::sm80
