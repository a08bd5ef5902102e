// SPDX-License-Identifier: Apache-2.0
// Computes a block mask of the highest-scoring key blocks (kernels/attention/top_k_selection.hpp) from rows that the
// ranks hold, before the Attention that uses it:
//
//   set_block_mask(job, top_k_block_mask(job, {128, 128, job.spec.kv_heads}, 16, {queries, keys, q, k}, transport,
//   options)); Attention attention(job, transport, options);
//
// Each rank computes the mean keys of its blocks and selects the blocks of its queries on the kernel's device. Mean
// keys and selected blocks are exchanged through host memory.
#pragma once

#include <memory>

#include "attention/options.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// Layouts, and this rank's rows in the kernel's kind of memory. Each mask block must lie on one rank.
struct TopKInputs {
  const Layout& queries;
  const Layout& keys;
  TensorView q;  // [queries.tokens(rank), heads, head_dim]
  TensorView k;  // [keys.tokens(rank), kv_heads, head_dim]
};

// Collective. A block mask of this shape: `count` key blocks per query block, by the scores of mean queries against
// mean keys. The mask is equal on every rank and does not depend on the layout. Rows are read after the work enqueued
// on `stream`; all work is complete on return. The job has no block_mask, and its keys are plain and not paged. Throws
// Error: kUsage (the job or the shape contradicts itself, count below 1, rows that don't fit, layouts of other tokens
// or ranks, a block on several ranks), kUnsupported (no kernel, or ranks differ), kMemory, kPeer.
std::shared_ptr<const BlockMask> top_k_block_mask(const Job& job, const BlockMaskShape& shape, int count,
                                                  const TopKInputs& rows, Transport& transport, const Options& options,
                                                  Stream stream = {});

}  // namespace ringattn
