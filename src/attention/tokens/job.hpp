// SPDX-License-Identifier: Apache-2.0
// An attention job: a spec and a batch. The same on every rank.
#pragma once

#include <cstdint>
#include <memory>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/layout.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn {

// A token of K and of V.
inline RowShape k_shape(const AttentionSpec& spec) { return {spec.dtype, spec.kv_heads, spec.head_dim}; }
inline RowShape v_shape(const AttentionSpec& spec) { return {spec.dtype, spec.kv_heads, spec.head_dim_v}; }

struct Job {
  AttentionSpec spec;
  Batch batch;
  std::int64_t page_size = 0;  // tokens per page if keys and values lie in a paged cache; 0: contiguous rows
  CacheFormat format = {};  // of keys and values in memory and messages; results are those of the decompressed values
  // Key tiles that each query block attends to, besides the mask; exactly if AttentionSpec::block_mask has a shape.
  std::shared_ptr<const BlockMask> block_mask = nullptr;
  // Positions of the keys, exactly if AttentionSpec::positions; null: key i has position i.
  std::shared_ptr<const KeyPositions> positions = nullptr;
};

// The batch's sequences as a BlockMask has them.
std::vector<MaskedSequence> masked_sequences(const Batch& batch);

// Sets the job's block mask; null removes it.
void set_block_mask(Job& job, std::shared_ptr<const BlockMask> block_mask);

// Sets the positions of the job's keys, for a cache from which tokens were evicted. q_offset is relative to them. If
// the mask lets the same keys through without positions (position_without_gaps(): queries after all evicted tokens, and
// a mask without a left limit), q_offset is changed instead and positions stay null, so that any kernel and op can run
// the job. Call it after the mask is set. Throws kUsage for positions of other sequences.
void set_positions(Job& job, std::shared_ptr<const KeyPositions> positions);

// Number of (query, key) pairs that mask and block mask let through, over all sequences; the mean over heads if heads
// have different masks.
double visible_pairs(const Job& job);

// Counts the visible pairs of a run of queries, by the mask, the block mask and the key positions (null: none). The
// arguments must outlive the function.
QueryWork query_work(const Batch& batch, const Mask& mask, const BlockMask* block_mask, const KeyPositions* positions);
QueryWork query_work(const Job& job);

// Distributes a batch's tokens by visible pairs (attention/tokens/layout.hpp), which a block mask makes uneven.
JobLayout make_layout(const Batch& batch, const QueryWork& work, bool listed, int world, const LayoutRequest& request,
                      int query_tile, int key_tile);
JobLayout make_layout(const Job& job, int world, const LayoutRequest& request, int query_tile, int key_tile);

// "bf16, heads 8/2 (GQA 4:1), head_dim 128, causal; 3 sequences, 1000 queries, 4096 keys"
std::string describe(const Job& job);

// Throws kUsage for a window beyond ±2^62.
void check_mask(const Mask& mask);

// Throws kUsage if the job contradicts itself: heads, dims, windows beyond ±2^62, page_size, its batch (check_batch()),
// formats that can't hold its keys or values or their pages, and block masks or positions of other sequences.
void check_job(const Job& job);

}  // namespace ringattn
