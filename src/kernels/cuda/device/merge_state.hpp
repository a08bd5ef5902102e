// SPDX-License-Identifier: Apache-2.0
// Saved states of groups that were folded elsewhere join a row's: AttentionKernel::merge_state() of the CUDA kernels.
#pragma once

#include "base/memory.hpp"
#include "kernels/cuda/attention_params.hpp"

namespace ringattn::cuda {

void merge_tensor_state(const MergeParams& params, Stream stream);  // of the kernels on tensor cores
void merge_simt_state(const MergeParams& params, Stream stream);    // of sm80_simt

}  // namespace ringattn::cuda
