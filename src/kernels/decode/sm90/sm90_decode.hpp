// SPDX-License-Identifier: Apache-2.0
// How the kernel `sm90_attention` decodes. decode/decode_table.cpp calls it.
#pragma once

#include <memory>

#include "kernels/decode/decode.hpp"
#include "kernels/decode/sm90/config.hpp"

namespace ringattn::sm90 {

// `backend` is a CudaBackend and must outlive the kernel. attention_missing() (config.hpp of prefill) says which specs
// are supported.
std::unique_ptr<DecodeKernel> make_decode(const DecodeSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
