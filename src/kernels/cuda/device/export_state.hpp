// SPDX-License-Identifier: Apache-2.0
// Saved states of the CUDA kernels as numbers: (m, l, O), see AttentionKernel::export_state().
#pragma once

#include "base/memory.hpp"
#include "kernels/cuda/attention_params.hpp"

namespace ringattn::cuda {

void export_tensor_state(const ExportParams& params, Stream stream);  // of the kernels on tensor cores
void export_simt_state(const ExportParams& params, Stream stream);    // of sm80_simt

}  // namespace ringattn::cuda
