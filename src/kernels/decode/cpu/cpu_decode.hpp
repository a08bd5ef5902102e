// SPDX-License-Identifier: Apache-2.0
// Decode of `cpu_attention`: threads process (sequence, up to 8 KV heads, KV split), then rows, whose partials they
// merge. It supports the same specs as prefill.
#pragma once

#include <memory>

#include "kernels/decode/decode.hpp"

namespace ringattn::cpu {

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<DecodeKernel> make_cpu_decode(const DecodeSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
