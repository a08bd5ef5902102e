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

// Packed keys, and the row of the first of them in a rank's cache of [pages · page_size] rows.
struct CachedKeyRun {
  PackedRun keys;
  std::int64_t row = 0;

  bool operator==(const CachedKeyRun&) const = default;
};

// A rank's cache: its pages, or the one page a sequence has of a dense cache. It holds the sequences of the rank's part
// (attention/tokens/decode_deal.hpp), and no entry of the table is read that is another's. Of these it has the part's
// heads.
struct RankCache {
  std::int64_t pages = 0;
  std::int64_t first_sequence = 0;    // that it holds
  std::int64_t page_size = 0;         // tokens
  std::vector<std::int32_t> numbers;  // [pages] each page's number in the job's pool, ascending; of a dense cache none
  std::vector<std::int32_t> table;    // [sequences, columns] of pages here; of a dense cache none
  std::int64_t columns = 0;
  // Ascending by row, each row once, though sequences may share it: then it is a key of the one that has most tokens,
  // and of these the most quantized ones, in its page.
  std::vector<CachedKeyRun> held;
};

// The decode spec of `input`, which must be decodes(); for latents the absorbed form, with values in keys.
DecodeSpec decode_spec(const JobInput& input);

// The same with the cache as the input stores it, where a kernel of this row reads that: the bits are the same, and the
// cache is smaller. Else rows are decompressed as the cache is filled. So they are for several ranks with a block mask,
// because each rank would need the formats' tables for only its own heads or sequences.
DecodeSpec stored_spec(const JobInput& input, const KernelRow<DecodeSpec>& row, int ranks);

// The prefixes that the sequences of a job share in its pages; none without pages.
SharedPrefixPages shared_prefixes(const JobInput& input, int key_tile);

// Decode steps with the sequences, rows and keys of `input`, dealt as evenly as its block mask allows.
// `format` is what the kernel was made for.
DecodeJob decode_job(const JobInput& input, int ranks, const DecodeKernel& kernel, const CacheFormat& format = {});

// The part of rank `rank` of `ranks` of a decode job; `job` is the result of decode_job(). Throws kMemory for a table
// of too many entries.
RankCache rank_cache(const JobInput& input, const DecodeJob& job, int rank, int ranks, std::int64_t kv_split_keys);

// Bytes of K and V, or of latents, that a step by `kernel` reads: the tiles that its rows see, once a K/V head, on all
// ranks together. Tiles of shared prefixes that the kernel computes for several sequences at once are read once.
double decode_bytes(const JobInput& input, const DecodeKernel& kernel, const CacheFormat& format = {});

}  // namespace ringattn
