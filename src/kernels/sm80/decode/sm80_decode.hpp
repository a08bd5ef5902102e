// SPDX-License-Identifier: Apache-2.0
// How the kernel row `sm80_attention` decodes.
#pragma once

#include <memory>

#include "kernels/decode.hpp"
#include "kernels/sm80/decode/config.hpp"

namespace ringattn::sm80 {

// `backend` is a CudaBackend and outlives the kernel; attention_missing() (sm80/config.hpp) says which specs it can do.
std::unique_ptr<DecodeKernel> make_decode(const DecodeSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
