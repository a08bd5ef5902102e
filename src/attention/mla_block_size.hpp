// SPDX-License-Identifier: Apache-2.0
// How much of a block of latents is gathered at a time (gathered_blocks.hpp): as much as the memory budget leaves room
// for beside what a rank needs anyway.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "attention/options.hpp"
#include "attention/tokens/mla_job.hpp"
#include "kernels/attention.hpp"
#include "kernels/batched_gemm.hpp"

namespace ringattn {

struct MlaBlockSize {
  int heads = 1;                      // at a time; divides the job's. Absorbed: all
  std::int64_t max_block_tokens = 0;  // PlanOptions::max_block_tokens

  bool operator==(const MlaBlockSize&) const = default;
};

// The kernels that a room is chosen for. The functions are called before choose_mla_block_size() returns.
struct BlockSizeKernels {
  // Of form_spec() for so many heads: all of the same tiles.
  std::function<std::unique_ptr<AttentionKernel>(int heads)> attention;
  const BatchedGemmKernel* keys;    // as MlaKernels has them
  const BatchedGemmKernel* values;  // likewise
};

// The largest room that a world of `world` ranks has. Without a budget these are blocks of 32,768 tokens, expanded for
// as many heads as fit into 256 MiB, or of 131,072 absorbed. With one there are fewer heads, and then fewer tokens,
// until everything fits: shards, state, scratch, and two buffers of such blocks. Where nothing does, the room that
// needs the least, so that a plan either has room for it or names what is enough. `heads_at_a_time` (MlaOptions) and
// Options::block_tokens are kept where they are stated. `job` has its form. Throws kUsage for a negative number of
// heads, and what WorldPlans throws of layouts.
MlaBlockSize choose_mla_block_size(const MlaJob& job, const Options& options, int heads_at_a_time, int world,
                                   const BlockSizeKernels& kernels);

}  // namespace ringattn
