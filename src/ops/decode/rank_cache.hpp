// SPDX-License-Identifier: Apache-2.0
// The keys of a job that a rank's cache holds, and their positions in it. Pure: no ranks run here, and nothing is read.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "attention/tokens/page_table.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/decode.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/decode/decode_memory.hpp"

namespace ringattn {

// Packed keys, and the row of the first one in a rank's cache of [pages · page_size] rows.
struct CachedKeyRun {
  PackedRun keys;
  std::int64_t row = 0;

  bool operator==(const CachedKeyRun&) const = default;
};

// A rank's cache: its pages or, in a dense cache, one page per sequence. It holds the sequences of the rank's part
// (attention/tokens/decode_deal.hpp), with the part's heads. Table entries of other sequences are not read.
struct RankCache {
  std::int64_t pages = 0;
  std::int64_t first_sequence = 0;  // the first that it holds
  std::int64_t page_size = 0;       // tokens
  std::vector<std::int32_t>
      numbers;                      // [pages] index of each page in the job's pool, ascending; empty for a dense cache
  std::vector<std::int32_t> table;  // [sequences, columns] indices of this rank's pages; empty for a dense cache
  std::int64_t columns = 0;
  // Ascending by row, each row once. A row that sequences share is listed for the sequence with most tokens in the
  // page, and among these for the one with most quantized tokens.
  std::vector<CachedKeyRun> held;
};

// The decode spec of `input`, which must be decodes(). For MLA it is the absorbed form, with values in keys.
DecodeSpec decode_spec(const JobInput& input);

// The same with the cache format of the input, if a kernel of this row reads that format: the bits are the same, and
// the cache is smaller. Otherwise rows are decompressed when the cache is filled. That is also done for several ranks
// with a block mask, because each rank would need the formats' tables for only its own heads or sequences.
DecodeSpec stored_spec(const JobInput& input, const KernelRow<DecodeSpec>& row, int ranks);

// The prefixes that the sequences of a job share in its pages; empty without pages.
SharedPrefixPages shared_prefixes(const JobInput& input, int key_tile);

// Decode steps with the sequences, rows and keys of `input`, distributed as evenly as its block mask allows. `format`:
// the cache format for which the kernel was made.
DecodeJob decode_job(const JobInput& input, int ranks, const DecodeKernel& kernel, const CacheFormat& format = {});

// The part of a decode job that rank `rank` of `ranks` holds. `job`: result of decode_job(). Throws kMemory for a table
// with too many entries.
RankCache rank_cache(const JobInput& input, const DecodeJob& job, int rank, int ranks, std::int64_t kv_split_keys);

// Bytes of K and V, or of latents, that a step by `kernel` reads on all ranks together: the tiles that its rows see,
// once per K/V head. Tiles of shared prefixes that the kernel computes for several sequences at once are counted once.
double decode_bytes(const JobInput& input, const DecodeKernel& kernel, const CacheFormat& format = {});

}  // namespace ringattn
