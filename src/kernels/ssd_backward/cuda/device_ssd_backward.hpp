// SPDX-License-Identifier: Apache-2.0
// SsdBackwardKernel on a GPU, without the arithmetic within a segment. Distributes runs over launches, and segments
// over batches whose states of chunks fit into bounded scratch memory. Used by sm80 and sm90.
#pragma once

#include <memory>

#include "kernels/common/backend.hpp"
#include "kernels/ssd_backward/cuda/ssd_backward_params.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"

namespace ringattn::cuda {

// The launcher is compiled for `head_dim` and `state_dim`, or fewer. `backend` must be a CudaBackend and must outlive
// the kernel. Nothing is allocated after reserve(), and no call waits.
std::unique_ptr<SsdBackwardKernel> make_device_ssd_backward(const SsdBackwardSpec& spec,
                                                            const SsdBackwardLauncher& launcher, int head_dim,
                                                            int state_dim, Backend& backend);

}  // namespace ringattn::cuda
