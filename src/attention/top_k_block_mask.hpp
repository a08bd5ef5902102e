// SPDX-License-Identifier: Apache-2.0
// Lists of the best blocks of keys for a job whose rows the ranks have in memory already (kernels/top_k_selection.hpp),
// in front of the Attention that follows them:
//
//   set_block_mask(job, top_k_block_mask(job, {128, 128, job.spec.kv_heads}, 16, {queries, keys, q, k}, transport,
//   options)); Attention attention(job, transport, options);
//
// Each rank makes the means of its keys and the lists of its queries, on the kernel's device. Mean keys and lists
// travel through host memory.
#pragma once

#include <memory>

#include "attention/options.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// Who has which tokens, and this rank's rows, in the kernel's kind of memory. A block of the lists lies on one rank.
struct TopKInputs {
  const Layout& queries;
  const Layout& keys;
  TensorView q;  // [queries.tokens(rank), heads, head_dim]
  TensorView k;  // [keys.tokens(rank), kv_heads, head_dim]
};

// Collective. Lists of this shape: `count` blocks by the scores of mean queries and mean keys, the same on every rank,
// however tokens are dealt. Rows are read behind what is enqueued on `stream`; all work is complete when it returns.
// The job has no block_mask, and its keys lie in rows as they are. Throws Error: kUsage (the job or the shape
// contradicts itself, a count below 1, rows that don't fit, layouts of other tokens or ranks, a block on several
// ranks), kUnsupported (no kernel; unlike ranks), kMemory, kPeer.
std::shared_ptr<const BlockMask> top_k_block_mask(const Job& job, const BlockMaskShape& shape, int count,
                                                  const TopKInputs& rows, Transport& transport, const Options& options,
                                                  Stream stream = {});

}  // namespace ringattn
