// SPDX-License-Identifier: Apache-2.0
// AttentionKernel::merge_state() of the CUDA kernels: merges saved states of KV splits computed elsewhere.
#pragma once

#include "base/memory.hpp"
#include "kernels/attention/cuda/attention_params.hpp"

namespace ringattn::cuda {

void merge_tensor_state(const MergeParams& params, Stream stream);  // states of tensor-core kernels
void merge_simt_state(const MergeParams& params, Stream stream);    // states of sm80_simt

}  // namespace ringattn::cuda
