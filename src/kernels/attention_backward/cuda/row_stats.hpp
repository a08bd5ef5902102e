// SPDX-License-Identifier: Apache-2.0
// The row stats of the backward pass on a GPU.
#pragma once

#include "kernels/attention_backward/attention_backward.hpp"

namespace ringattn::cuda {

// Loads the kernel on the current device.
void prepare_row_stats();
// Enqueues a RowStatsTask. `out` and `dout` have bf16 or fp16 elements.
void compute_row_stats(const RowStatsTask& task, Stream stream);

}  // namespace ringattn::cuda
