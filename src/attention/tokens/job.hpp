// SPDX-License-Identifier: Apache-2.0
// A job of attention: which fold, over which batch. Plain data, the same on every rank.
#pragma once

#include <cstdint>
#include <memory>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/layout.hpp"
#include "kernels/attention.hpp"
#include "kernels/row_format.hpp"

namespace ringattn {

struct Job {
  AttentionSpec spec;
  Batch batch;
  std::int64_t page_size = 0;  // keys and values lie in pages of a cache, of so many tokens; 0: in rows of their own
  CacheFormat format = {};     // how keys and values are stored, and travel; what they are is what decompression gives
  // Which key tiles each query block folds, beside what the mask says; present exactly where spec.lists are.
  std::shared_ptr<const BlockMask> block_mask = nullptr;
  // Where each key stands, present exactly where spec.positions are; null: key i stands at position i.
  std::shared_ptr<const KeyPositions> positions = nullptr;
};

// The batch's sequences as lists of tiles have them.
std::vector<MaskedSequence> masked_sequences(const Batch& batch);

// Gives the job lists of tiles; null takes them away.
void set_block_mask(Job& job, std::shared_ptr<const BlockMask> block_mask);

// Gives the job's keys their positions: those of a cache from which tokens were taken out. q_offset counts as before,
// by these positions. Where the job's mask lets through the same keys without them, with queries that stand elsewhere
// (position_without_gaps(): queries behind all that was taken out, under a mask without a left side), the queries are
// moved instead, and any kernel and any front door can do the job; positions are then left out. Called when the mask is
// known. Throws kUsage for positions of other sequences.
void set_positions(Job& job, std::shared_ptr<const KeyPositions> positions);

// (query, key) pairs that the mask, and the block_mask, let through, all sequences; the mean over heads with lists of
// their own.
double visible_pairs(const Job& job);

// The visible pairs of a run of a batch's queries, by the mask, by lists and by positions of keys (null: there are
// none). What it is given outlives the function.
QueryWork query_work(const Batch& batch, const Mask& mask, const BlockMask* block_mask, const KeyPositions* positions);
QueryWork query_work(const Job& job);

// Deals a batch's tokens by the pairs that its queries see (attention/tokens/layout.hpp), which lists make uneven.
JobLayout make_layout(const Batch& batch, const QueryWork& work, bool listed, int world, const LayoutRequest& request,
                      int query_tile, int key_tile);
JobLayout make_layout(const Job& job, int world, const LayoutRequest& request, int query_tile, int key_tile);

// "bf16, heads 8/2 (GQA 4:1), head_dim 128, causal; 3 sequences, 1000 queries, 4096 keys"
std::string describe(const Job& job);

// Throws kUsage for a window beyond ±2^62.
void check_mask(const Mask& mask);

// Throws kUsage when the job contradicts itself: heads, dims, windows beyond ±2^62, page_size, its batch
// (check_batch()), formats that don't hold its keys or values, or pages of them, or lists or positions that are those
// of other sequences.
void check_job(const Job& job);

}  // namespace ringattn
