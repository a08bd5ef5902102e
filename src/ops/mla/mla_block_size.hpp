// SPDX-License-Identifier: Apache-2.0
// Chooses the block size and the heads expanded at a time of an MLA job from the memory budget. Called by Mla and by
// plan summaries. gathered_blocks.hpp defines the rows of a block.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "attention/options.hpp"
#include "attention/tokens/mla_job.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/gemm/batched_gemm.hpp"

namespace ringattn {

struct MlaBlockSize {
  int heads = 1;                      // expanded at a time, a divisor of the job's heads. Absorbed: all
  std::int64_t max_block_tokens = 0;  // PlanOptions::max_block_tokens

  bool operator==(const MlaBlockSize&) const = default;
};

// Kernels that the choice asks for state and scratch sizes. The functions are called before choose_mla_block_size()
// returns.
struct BlockSizeKernels {
  // Kernel of form_spec() for `heads` heads. The kernels of all head counts must have the same tiles.
  std::function<std::unique_ptr<AttentionKernel>(int heads)> attention;
  const BatchedGemmKernel* keys;    // as in MlaKernels
  const BatchedGemmKernel* values;  // as in MlaKernels
};

// The largest block size for a world of `world` ranks. Without a budget: 32,768 tokens, expanded for as many heads as
// fit into 256 MiB; absorbed 131,072 tokens. With a budget, first the heads and then the tokens are reduced until
// shards, state, scratch and two block buffers fit. If nothing fits, the choice that needs least memory, so that the
// plan can report a sufficient budget. Stated `heads_at_a_time` (MlaOptions) and Options::block_tokens are kept. `job`
// has its form. Throws kUsage for a negative number of heads, and the layout errors of WorldPlans.
MlaBlockSize choose_mla_block_size(const MlaJob& job, const Options& options, int heads_at_a_time, int world,
                                   const BlockSizeKernels& kernels);

}  // namespace ringattn
