// SPDX-License-Identifier: Apache-2.0
// The kernel `sm90_attention` for Hopper: prefill with TMA and wgmma. attention/attention_table.cpp calls these
// functions.
#pragma once

#include <memory>

#include "kernels/attention/attention.hpp"

namespace ringattn::sm90 {

// `backend` is a CudaBackend and must outlive the kernel. config.hpp says which specs are supported.
std::unique_ptr<AttentionKernel> make_attention(const AttentionSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
