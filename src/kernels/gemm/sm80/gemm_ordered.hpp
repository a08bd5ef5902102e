// SPDX-License-Identifier: Apache-2.0
// The compiled kernel of sm80_gemm_ordered (gemm_ordered.cu).
#pragma once

#include "kernels/gemm/cuda/gemm_params.hpp"

namespace ringattn::sm80 {

// A CTA computes kOrderedTileM rows of out. It computes kSmallOrderedTileN columns if N ≤ kSmallN, else
// kLargeOrderedTileN.
inline constexpr int kOrderedTileM = 128;
inline constexpr int kSmallOrderedTileN = 32;
inline constexpr int kLargeOrderedTileN = 128;
inline constexpr int kSmallN = 64;

extern const cuda::GemmLauncher gemm_ordered_bf16;
extern const cuda::GemmLauncher gemm_ordered_fp16;

}  // namespace ringattn::sm80
