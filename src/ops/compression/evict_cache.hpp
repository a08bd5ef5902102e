// SPDX-License-Identifier: Apache-2.0
// Taking tokens out of a cache: what is left of it, and where each key stands.
#pragma once

#include "kernels/quant/eviction.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/compression/cache_rows.hpp"

namespace ringattn {

// Refuses what evict() would, before rows are read: kFile for queries that are not finite (tensor and place) and what
// makes no job of cache and queries; kUnsupported for sequences whose positions an I32 doesn't hold.
void check_eviction(const Eviction& eviction, const InputRequest& input, const Numerics& numerics,
                    const CacheRows& cache);

// Bytes of host memory that evict() takes at the most, with the rows of both tensors.
double eviction_bytes(const Eviction& eviction, double ratio, const CacheRows& cache);

// The default share of tokens that are evicted.
inline constexpr double kDefaultEviction = 0.5;

// Leaves kept_tokens() of each sequence's tokens, those that the eviction chooses, and adds k_positions and k_lengths
// to the tensors beside them (ops/attention_jobs/position_tensors.hpp). Other lists of lengths, and the grid, are the
// caller's. The cache's rows are read, and finite. A method that looks at queries reads them from
// `input`, whose cache it is, and `numerics` say its mask, scale and soft-cap. Throws kUsage for a ratio that is none
// and a method without the queries it needs, kFile for queries that are not finite (tensor and place).
void evict(const Eviction& eviction, double ratio, const InputRequest& input, const Numerics& numerics, int threads,
           CacheRows& cache);

// Bytes of the tensors that it added.
std::int64_t position_bytes(const CacheRows& cache);

}  // namespace ringattn
