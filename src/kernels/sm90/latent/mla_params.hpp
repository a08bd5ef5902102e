// SPDX-License-Identifier: Apache-2.0
// What a launch over latents of 8 bits is given, besides what every decode kernel is.
#pragma once

#include "kernels/latent_rows.hpp"
#include "kernels/sm90/decode/compressed_params.hpp"

namespace ringattn::sm90 {

struct MlaFp8Params {
  // k finds the fp8, two of them an element of 16 bits; v the rotary keys.
  DecodeParams step;
  PagedBytes scales;  // four of a row
};

#ifdef __CUDACC__
__device__ __forceinline__ const DecodeParams& step_of(const DecodeParams& params) { return params; }
__device__ __forceinline__ const DecodeParams& step_of(const MlaFp8Params& params) { return params.step; }
#endif

}  // namespace ringattn::sm90
