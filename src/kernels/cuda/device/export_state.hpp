// SPDX-License-Identifier: Apache-2.0
// Saved states of this folder's kernels as numbers: (m, l, O), see FoldKernel::export_state().
#pragma once

#include "base/memory.hpp"
#include "kernels/cuda/fold_params.hpp"

namespace ringattn::cuda {

void export_fold_state(const cuda::ExportParams& params, Stream stream);
void export_grouped_state(const cuda::ExportParams& params, Stream stream);  // sm90_fold's
void export_plain_state(const cuda::ExportParams& params, Stream stream);

}  // namespace ringattn::cuda
