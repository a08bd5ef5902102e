// SPDX-License-Identifier: Apache-2.0
// The launch of sm80_plain, and how it cuts its work.
#pragma once

#include "base/memory.hpp"
#include "kernels/cuda/fold_params.hpp"

namespace ringattn::cuda {

inline constexpr int kPlainKeyTile = 128;
inline constexpr int kPlainItemRows = 16;
inline constexpr int kPlainMaxHeadDim = 256;

// Enqueues the fold of params.tables.item_count items for every head. Throws what the launch fails with.
void launch_plain(const cuda::FoldParams& params, Stream stream);

}  // namespace ringattn::cuda
