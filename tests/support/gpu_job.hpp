// SPDX-License-Identifier: Apache-2.0
// The job that tests of attention on GPUs use: causal, bf16, a few heads.
#pragma once

#include <cstdint>

#include "kernels/attention/attention_spec.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

inline constexpr int kGpuHeads = 4, kGpuKvHeads = 2, kGpuDim = 128;

// One sequence of that many tokens.
inline Job gpu_job(std::int64_t tokens) {
  return {make_spec(Dtype::kBf16, kGpuHeads, kGpuKvHeads, kGpuDim, {-1, 0}), uniform_batch(1, tokens, tokens)};
}

inline Options on_gpu(std::int64_t block_tokens = 0) {
  Options options;
  options.kernel.backend = "cuda";
  options.block_tokens = block_tokens;
  return options;
}

}  // namespace ringattn::testing
