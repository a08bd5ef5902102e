// SPDX-License-Identifier: Apache-2.0
// The compiled sm80_simt kernel and its tile sizes.
#pragma once

#include "kernels/attention/cuda/attention_params.hpp"

namespace ringattn::cuda {

inline constexpr int kSimtKeyTile = 128;
inline constexpr int kSimtTileRows = 16;
inline constexpr int kSimtMaxHeadDim = 512;

extern const Launcher simt_attention;

}  // namespace ringattn::cuda
