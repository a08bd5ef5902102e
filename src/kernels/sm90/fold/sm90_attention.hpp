// SPDX-License-Identifier: Apache-2.0
// The kernel row `sm90_attention`: Hopper's tensor cores and copy engine.
#pragma once

#include <memory>
#include <string>

#include "kernels/attention.hpp"

namespace ringattn::sm90 {

// Why it can't run here: a device that is not of compute capability 9.0, as its instructions are of that one only.
std::string attention_unavailable();

// `backend` is a CudaBackend and outlives the kernel; config.hpp says which specs it can do.
std::unique_ptr<AttentionKernel> make_attention(const AttentionSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
