// SPDX-License-Identifier: Apache-2.0
// The compiled kernel of sm80_simt, and how it cuts its work.
#pragma once

#include "kernels/cuda/launcher.hpp"

namespace ringattn::cuda {

inline constexpr int kSimtKeyTile = 128;
inline constexpr int kSimtTileRows = 16;
inline constexpr int kSimtMaxHeadDim = 512;

extern const Launcher simt_attention;

}  // namespace ringattn::cuda
