// SPDX-License-Identifier: Apache-2.0
// Evicts tokens from a cache: computes the kept rows and the position of each key.
#pragma once

#include "kernels/quant/eviction.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/compression/cache_rows.hpp"

namespace ringattn {

// Throws the errors of evict() before rows are read: kFile for queries that are not finite (naming tensor and index)
// and for a cache and queries that make no job; kUnsupported for sequences whose positions exceed an I32.
void check_eviction(const Eviction& eviction, const InputRequest& input, const Numerics& numerics,
                    const CacheRows& cache);

// The largest number of bytes of host memory that evict() uses, including the rows of both tensors.
double eviction_bytes(const Eviction& eviction, double ratio, const CacheRows& cache);

// The default share of tokens to evict.
inline constexpr double kDefaultEviction = 0.5;

// Keeps kept_tokens() of each sequence's tokens, as the eviction selects them, and adds k_positions and k_lengths to
// the other tensors (ops/attention_jobs/position_tensors.hpp). The caller updates other lists of lengths, and the grid.
// The rows of the cache have been read, and are finite. A method that needs queries reads them from `input`, to which
// the cache belongs, with the mask, scale and softcap of `numerics`. Throws kUsage for an invalid ratio and for a
// method without the queries that it needs, and kFile for queries that are not finite (naming tensor and index).
void evict(const Eviction& eviction, double ratio, const InputRequest& input, const Numerics& numerics, int threads,
           CacheRows& cache);

// Bytes of the tensors that evict() added.
std::int64_t position_bytes(const CacheRows& cache);

}  // namespace ringattn
