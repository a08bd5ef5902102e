// SPDX-License-Identifier: Apache-2.0
// The compiled kernel of sm80_chain (chain.cu).
#pragma once

#include "kernels/cuda/product_params.hpp"

namespace ringattn::sm80 {

// A CTA has 128 rows of out and so many columns: few where out has no more than kFewColumnsOuter.
inline constexpr int kChainRows = 128;
inline constexpr int kFewChainColumns = 32;
inline constexpr int kManyChainColumns = 128;
inline constexpr int kFewColumnsOuter = 64;

extern const cuda::ProductLauncher chain_bf16;
extern const cuda::ProductLauncher chain_fp16;

}  // namespace ringattn::sm80
