// SPDX-License-Identifier: Apache-2.0
// A job of decoding, and the memory that it takes: pure functions, for plans and budgets. No ranks, no devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/tokens/decode_deal.hpp"
#include "kernels/decode.hpp"

namespace ringattn {

// What is decoded, and the most that any step holds. Plain data, the same on every rank.
struct DecodeJob {
  AttentionSpec spec;
  DecodeLimits limits;
  std::int64_t page_size = 0;  // tokens: 16, 32, 64, 128 or 256; 0: a dense cache, where each sequence has one page
  // Of each rank's pool. 0: as many as sequences that are as long as the limits allow need where they share no page.
  std::int64_t pages = 0;
  // v is the first head_dim_v numbers of each row of k, in the same memory, as where a latent is both.
  bool values_in_keys = false;
  // How the cache stores k and v; what they are is what decompression gives. Of values_in_keys that of k says it for
  // both, and that of v is plain.
  CacheFormat format = {};
  // Of a spec with lists: each step makes its lists by itself, of so many blocks of key_block keys (Decode). 0: each is
  // given them.
  int top_k_blocks = 0;
  // Of a spec with block_mask, on several ranks: into how many parts K/V heads are dealt, a divisor of the ranks. 0: as
  // it is even where all sequences have as much to fold (attention/tokens/decode_deal.hpp). What ranks have not dealt
  // by heads they deal by sequences.
  int head_parts = 0;

  DecodeSpec decode_spec() const { return {spec, values_in_keys, format}; }
  bool is_paged() const { return page_size > 0; }
};

// "decode, bf16, heads 32/8 (GQA 4:1), head_dim 128, causal; 64 sequences, up to 131072 keys and 4 rows each, pages of
// 64 tokens"
std::string describe(const DecodeJob& job);

// Throws kUsage when the job contradicts itself: heads, dims, formats, limits that are not positive or beyond 2^31 − 1
// keys, page sizes that are not supported, lists beside prefixes, top_k_blocks without lists or of keys that are not
// plain, and head_parts without lists.
void check_decode_job(const DecodeJob& job);

// How ranks deal its steps. Throws kUsage where so many ranks can't deal DecodeJob::head_parts.
DecodeDeal deal_of(const DecodeJob& job, int ranks);

// What the rank's kernel does: the job over the sequences and K/V heads of its part. The last rank has as many of both
// as any.
DecodeJob rank_job(const DecodeJob& job, int rank, int ranks);
inline DecodeJob largest_rank_job(const DecodeJob& job, int ranks) { return rank_job(job, ranks - 1, ranks); }

// Tokens that the rank with most of them holds of the longest sequence: the least page_size of a dense cache, and what
// a block table has to reach.
std::int64_t max_cache_tokens(const DecodeJob& job, int ranks, std::int64_t kv_split_keys);

// Entries of a sequence in a rank's block table that reach the limits; 1 for a dense cache.
std::int64_t max_table_pages(const DecodeJob& job, int ranks, std::int64_t kv_split_keys);

// What ranks leave of a row for its owner: partials of the groups of a share, or one record of results.
struct RowPartials {
  std::vector<std::int64_t> bytes;  // [ranks] of a record
  std::int64_t splits = 1;          // records of a row, at most
};
// `kernel`: of largest_rank_job().
RowPartials row_partials(const DecodeJob& job, const DecodeKernel& kernel, int ranks);

// Blocks of a list's size that the longest sequence has.
std::int64_t max_mask_blocks(const DecodeJob& job);

// What a Decode that makes lists keeps for it.
struct TopKMemory {
  std::size_t means = 0;   // of keys
  std::size_t scores = 0;  // of blocks
  std::size_t chosen = 0;  // lists
  std::size_t counts = 0;  // how long they are

  std::size_t total() const { return means + scores + chosen + counts; }
};
TopKMemory top_k_memory(const DecodeJob& job);

// Bytes on the rank of `ranks` that needs most.
struct DecodeMemory {
  std::size_t cache = 0;     // k and v
  std::size_t tables = 0;    // block table and lengths
  std::size_t rows = 0;      // q, new rows, out and LSE
  std::size_t scratch = 0;   // of the kernel, and what checks leave
  std::size_t partials = 0;  // of several ranks: what they send, and what they receive

  // What a Decode allocates; the rest is its caller's.
  std::size_t own() const { return scratch + partials; }
  std::size_t total() const { return cache + tables + rows + scratch + partials; }
};

// `kernel`: of largest_rank_job(). It may be made on a backend without a device.
DecodeMemory decode_memory(const DecodeJob& job, const DecodeKernel& kernel, int ranks);
// Throws kMemory for a budget (0: none) that doesn't hold all of it.
void check_budget(const DecodeMemory& needed, std::size_t budget);

}  // namespace ringattn
