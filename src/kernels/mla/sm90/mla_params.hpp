// SPDX-License-Identifier: Apache-2.0
// Kernel arguments of a launch over the FP8 latent cache. All other MLA decode launches get DecodeParams.
#pragma once

#include "kernels/decode/sm90/compressed_params.hpp"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn::sm90 {

struct MlaFp8Params {
  // step.k maps the fp8 values as 16-bit elements, two values each. step.v maps the rotary keys.
  DecodeParams step;
  PagedBytes scales;  // float[4] per row, one scale per 128 latent columns
};

#ifdef __CUDACC__
__device__ __forceinline__ const DecodeParams& step_of(const DecodeParams& params) { return params; }
__device__ __forceinline__ const DecodeParams& step_of(const MlaFp8Params& params) { return params.step; }
#endif

}  // namespace ringattn::sm90
