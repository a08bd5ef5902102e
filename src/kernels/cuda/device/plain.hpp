// SPDX-License-Identifier: Apache-2.0
// The compiled kernel of sm80_plain, and how it cuts its work.
#pragma once

#include "kernels/cuda/launcher.hpp"

namespace ringattn::cuda {

inline constexpr int kPlainKeyTile = 128;
inline constexpr int kPlainItemRows = 16;
inline constexpr int kPlainMaxHeadDim = 512;

extern const Launcher plain_fold;

}  // namespace ringattn::cuda
