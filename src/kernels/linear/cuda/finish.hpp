// SPDX-License-Identifier: Apache-2.0
// The last step of a row-parallel layer on a GPU: adds the sums of leaves, and writes y (LinearKernel::finish).
#pragma once

#include "kernels/linear/linear.hpp"

namespace ringattn::cuda {

// Enqueues on the current device, after prepare_finish() (finish_params.hpp). kInt8: bf16 and fp16, int32 sums
// of each partial's leaves, and all scales.
void enqueue_finish(const LinearSpec& spec, const LinearFinishTask& task, Stream stream);

}  // namespace ringattn::cuda
