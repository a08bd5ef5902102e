// SPDX-License-Identifier: Apache-2.0
// How `cpu_attention` decodes: threads over (sequence, KV head, group of key tiles), then over rows, whose partials
// they merge. It can do what the fold can.
#pragma once

#include <memory>

#include "kernels/decode.hpp"

namespace ringattn::cpu {

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<DecodeKernel> make_cpu_decode(const DecodeSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
