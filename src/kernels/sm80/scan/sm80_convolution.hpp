// SPDX-License-Identifier: Apache-2.0
// The kernel row `sm80_convolution`: fp32 arithmetic, eight channels a thread, rows of a piece of a run one after the
// other. Moves x and y once, and of x the tokens in front of each piece.
#pragma once

#include <memory>

#include "kernels/backend.hpp"
#include "kernels/convolution.hpp"

namespace ringattn::sm80 {

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<ConvolutionKernel> make_convolution(const ConvolutionSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
