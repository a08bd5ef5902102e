// SPDX-License-Identifier: Apache-2.0
// The causal conv1d kernel `sm80_conv1d`: fp32 arithmetic, eight channels per thread, tokens of a tile in order. Reads
// x and writes y once, and reads width − 1 tokens before each tile again.
#pragma once

#include <memory>

#include "kernels/common/backend.hpp"
#include "kernels/ssm/causal_conv1d.hpp"

namespace ringattn::sm80 {

// `backend` must be a CudaBackend and must outlive the kernel.
std::unique_ptr<CausalConv1dKernel> make_conv1d(const CausalConv1dSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
