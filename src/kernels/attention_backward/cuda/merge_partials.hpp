// SPDX-License-Identifier: Apache-2.0
// Adds partial sums of the backward pass that CTAs computed apart.
#pragma once

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "kernels/attention_backward/cuda/backward_params.hpp"

namespace ringattn::cuda {

// Columns [part, part + columns) of a sum of `width` floats, and the gradient that they become.
struct MergedSum {
  BackwardGradient gradient;
  std::int32_t width, part, columns;
  float factor;
};

// Loads the kernel on the current device.
void prepare_merge_partials();
// Enqueues. Adds the partial sums of BackwardTables::merged, ascending, as a CTA adds its splits, and writes the
// gradients of their rows. `ctas` and `head_tiles` are those of the launch that computed the sums.
void merge_partials(const BackwardCommon& common, const MergedSum& sum, Dtype dtype, int ctas, int head_tiles,
                    Stream stream);

}  // namespace ringattn::cuda
