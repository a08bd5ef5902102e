// SPDX-License-Identifier: Apache-2.0
// Launches of sm80_fold: one entry for each pair of element type and configuration that is compiled (fold_*.cu).
#pragma once

#include "base/memory.hpp"
#include "kernels/cuda/fold_params.hpp"

namespace ringattn::sm80 {

// Each enqueues the fold of params.tables.item_count items for every head, and throws what the launch fails with.
void launch_bf16_64(const cuda::FoldParams& params, Stream stream);
void launch_bf16_96(const cuda::FoldParams& params, Stream stream);
void launch_bf16_128(const cuda::FoldParams& params, Stream stream);
void launch_bf16_192(const cuda::FoldParams& params, Stream stream);
void launch_bf16_256(const cuda::FoldParams& params, Stream stream);
void launch_fp16_64(const cuda::FoldParams& params, Stream stream);
void launch_fp16_96(const cuda::FoldParams& params, Stream stream);
void launch_fp16_128(const cuda::FoldParams& params, Stream stream);
void launch_fp16_192(const cuda::FoldParams& params, Stream stream);
void launch_fp16_256(const cuda::FoldParams& params, Stream stream);

}  // namespace ringattn::sm80
