// SPDX-License-Identifier: Apache-2.0
// The registry entry `sm80_simt`: fp32 arithmetic without tensor cores, for accuracy and generality. fp32, bf16, fp16;
// head dims that are multiples of 8 up to 512, equal or not; all masks, soft-cap, sinks, and keys with explicit
// positions. A row attends to exactly the keys that it sees, so NaN and ∞ appear where the oracle has them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/attention/attention.hpp"

namespace ringattn::sm80 {

std::vector<std::string> simt_missing(const AttentionSpec& spec);

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<AttentionKernel> make_simt(const AttentionSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
