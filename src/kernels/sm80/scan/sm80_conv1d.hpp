// SPDX-License-Identifier: Apache-2.0
// The kernel row `sm80_conv1d`: fp32 arithmetic, eight channels a thread, rows of a piece of a run one after the
// other. Moves x and y once, and of x the tokens in front of each piece.
#pragma once

#include <memory>

#include "kernels/backend.hpp"
#include "kernels/causal_conv1d.hpp"

namespace ringattn::sm80 {

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<CausalConv1dKernel> make_conv1d(const CausalConv1dSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
