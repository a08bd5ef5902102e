// SPDX-License-Identifier: Apache-2.0
// A decode job and its memory. Pure functions without ranks or devices, for plans and budgets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/tokens/decode_deal.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/rope/rope.hpp"

namespace ringattn {

// The problem of a decode, and the maximum sizes of its steps. The same on every rank.
struct DecodeJob {
  AttentionSpec spec;
  DecodeLimits limits;
  std::int64_t page_size = 0;  // tokens: 16, 32, 64, 128 or 256; 0: a dense cache with one page per sequence
  // Pages of each rank's pool. 0: the number that the limits need if sequences share no page.
  std::int64_t pages = 0;
  // v is the first head_dim_v columns of each row of k, in the same memory, as in an MLA cache.
  bool values_in_keys = false;
  // Formats of k and v in the cache. Results are those of the decompressed values. With values_in_keys the format of k
  // is that of both, and the format of v is plain.
  CacheFormat format = {};
  // With AttentionSpec::block_mask: each step selects this many blocks of key_block keys itself (Decode). 0: the caller
  // passes a block mask to each step.
  int top_k_blocks = 0;
  // With AttentionSpec::block_mask and several ranks: the number of parts into which K/V heads are split, a divisor of
  // the number of ranks. Ranks of the same heads distribute sequences. 0: the split that balances sequences of equal
  // length (attention/tokens/decode_deal.hpp).
  int head_parts = 0;
  // Steps rotate q and k_new by RoPE, each token by its position in its sequence, with the bits of a Rope before the
  // step. Keys that are already in the cache must have been rotated. One axis of positions.
  std::optional<RopeSpec> rope = {};

  DecodeSpec decode_spec() const { return {spec, values_in_keys, format}; }
  bool is_paged() const { return page_size > 0; }
};

// "decode, bf16, heads 32/8 (GQA 4:1), head_dim 128, causal; 64 sequences, up to 131072 keys and 4 rows each, pages of
// 64 tokens"
std::string describe(const DecodeJob& job);

// Throws kUsage if the job contradicts itself: heads, dims, formats, limits that are not positive or exceed 2^31 − 1
// keys, unsupported page sizes, a block mask together with prefixes, top_k_blocks without a block mask or with keys
// that are not plain, head_parts without a block mask, and RoPE of other rows.
void check_decode_job(const DecodeJob& job);

// How the ranks partition decode. Throws kUsage if the ranks can't be split by DecodeJob::head_parts.
DecodeDeal deal_of(const DecodeJob& job, int ranks);

// The job of one rank's kernel: the sequences and K/V heads of its part. The last rank has the maximum of both.
DecodeJob rank_job(const DecodeJob& job, int rank, int ranks);
inline DecodeJob largest_rank_job(const DecodeJob& job, int ranks) { return rank_job(job, ranks - 1, ranks); }

// Tokens of the longest sequence that the rank with most of them holds: the minimum page_size of a dense cache, and the
// range of a block table.
std::int64_t max_cache_tokens(const DecodeJob& job, int ranks, std::int64_t kv_split_keys);

// Entries per sequence of a rank's block table at the limits; 1 for a dense cache.
std::int64_t max_table_pages(const DecodeJob& job, int ranks, std::int64_t kv_split_keys);

// Records that a rank sends to a row's owner: partials of its KV splits, or one record of head results.
struct RowPartials {
  std::vector<std::int64_t> bytes;  // [ranks], per record
  std::int64_t splits = 1;          // maximum number of records per row
};
// `kernel`: kernel of largest_rank_job().
RowPartials row_partials(const DecodeJob& job, const DecodeKernel& kernel, int ranks);

// Number of mask blocks of the longest sequence.
std::int64_t max_mask_blocks(const DecodeJob& job);

// Memory of a Decode that selects key blocks itself.
struct TopKMemory {
  std::size_t means = 0;   // mean keys
  std::size_t scores = 0;  // block scores
  std::size_t chosen = 0;  // selected block indices
  std::size_t counts = 0;  // number of selected blocks

  std::size_t total() const { return means + scores + chosen + counts; }
};
TopKMemory top_k_memory(const DecodeJob& job);

// Memory of a Decode that rotates rows.
struct RotatedRowsMemory {
  std::size_t frequencies = 0;
  std::size_t q = 0;  // rotated queries of a step
  std::size_t k = 0;  // rotated keys of a step, before they are quantized

  std::size_t total() const { return frequencies + q + k; }
};
RotatedRowsMemory rotated_rows_memory(const DecodeJob& job);

// Bytes on the rank of `ranks` that needs most.
struct DecodeMemory {
  std::size_t cache = 0;     // k and v
  std::size_t tables = 0;    // block table and lengths
  std::size_t rows = 0;      // q, new keys and values, out and LSE
  std::size_t scratch = 0;   // of the kernel and the checks
  std::size_t partials = 0;  // several ranks: partials sent and received

  // Bytes that a Decode allocates. The caller owns the rest.
  std::size_t own() const { return scratch + partials; }
  std::size_t total() const { return cache + tables + rows + scratch + partials; }
};

// `kernel`: kernel of largest_rank_job(). Its backend may have no device.
DecodeMemory decode_memory(const DecodeJob& job, const DecodeKernel& kernel, int ranks);
// Throws kMemory if a budget (0: none) is too small.
void check_budget(const DecodeMemory& needed, std::size_t budget);

}  // namespace ringattn
