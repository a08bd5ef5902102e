// SPDX-License-Identifier: Apache-2.0
// Exports saved states of the CUDA kernels as (m, l, O). See AttentionKernel::export_state().
#pragma once

#include "base/memory.hpp"
#include "kernels/attention/cuda/attention_params.hpp"

namespace ringattn::cuda {

void export_tensor_state(const ExportParams& params, Stream stream);  // states of tensor-core kernels
void export_simt_state(const ExportParams& params, Stream stream);    // states of sm80_simt

}  // namespace ringattn::cuda
