// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of sm90_attention_backward, and how the host reaches its compiled kernels.
#pragma once

#include <cuda.h>

#include "kernels/attention_backward/cuda/backward_params.hpp"

namespace ringattn::sm90 {

using cuda::BackwardCommon;
using cuda::kInlineSources;

// Maps are empty unless BackwardCommon::bulk. Boxes hold one head's columns: kBackwardTile rows of Q and dO, a key tile
// of K and V.
struct DqParams {
  BackwardCommon common;
  CUtensorMap q, dout;
  CUtensorMap k[kInlineSources], v[kInlineSources];
  const float* stats;  // [rows, heads, kRowStats]
  cuda::BackwardGradient dq;
};

// All boxes have kBackwardTile rows.
struct DkvParams {
  BackwardCommon common;
  CUtensorMap k, v;
  CUtensorMap q[kInlineSources], dout[kInlineSources];
  const float* stats;  // [tiles, heads, kRowStats, kBackwardTile]
  cuda::BackwardGradient dk, dv;
};

// dQ from the dS that the dK/dV kernel has stored. Boxes have kBackwardTile rows.
struct DqFromDsParams {
  BackwardCommon common;
  CUtensorMap k[kInlineSources];
  cuda::BackwardGradient dq;
};

struct BackwardLauncher {
  // Loads the kernels on the current device.
  void (*prepare)();
  // Enqueue. At least one pair is in the tables. dkv stores dS if BackwardCommon::spill is set.
  void (*dq)(const DqParams& params, int ctas, Stream stream);
  void (*dkv)(const DkvParams& params, int ctas, Stream stream);
  void (*dq_from_ds)(const DqFromDsParams& params, int ctas, Stream stream);  // null unless BackwardConfig::spills()
};

extern const BackwardLauncher attention_backward_bf16_64;
extern const BackwardLauncher attention_backward_bf16_96;
extern const BackwardLauncher attention_backward_bf16_128;
extern const BackwardLauncher attention_backward_bf16_192;  // head_dim_v 128
extern const BackwardLauncher attention_backward_bf16_256;
extern const BackwardLauncher attention_backward_fp16_64;
extern const BackwardLauncher attention_backward_fp16_96;
extern const BackwardLauncher attention_backward_fp16_128;
extern const BackwardLauncher attention_backward_fp16_192;
extern const BackwardLauncher attention_backward_fp16_256;

}  // namespace ringattn::sm90
