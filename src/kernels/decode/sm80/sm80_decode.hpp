// SPDX-License-Identifier: Apache-2.0
// Decode with the registry entry `sm80_attention`.
#pragma once

#include <memory>

#include "kernels/decode/decode.hpp"
#include "kernels/decode/sm80/config.hpp"

namespace ringattn::sm80 {

// `backend` is a CudaBackend and outlives the kernel. attention_missing() (attention/sm80/config.hpp) checks specs.
std::unique_ptr<DecodeKernel> make_decode(const DecodeSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
