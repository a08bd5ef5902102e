// SPDX-License-Identifier: Apache-2.0
// The kernel `sm90_attention` for Hopper: prefill with TMA and wgmma. attention/attention_table.cpp calls these
// functions.
#pragma once

#include <memory>
#include <string>

#include "kernels/attention/attention.hpp"

namespace ringattn::sm90 {

// Why the kernel can't run here: it needs a device of compute capability 9.0 exactly, since sm_90a code runs on no
// other. Empty: it can.
std::string attention_unavailable();

// `backend` is a CudaBackend and must outlive the kernel. config.hpp says which specs are supported.
std::unique_ptr<AttentionKernel> make_attention(const AttentionSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
