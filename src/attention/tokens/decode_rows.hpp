// SPDX-License-Identifier: Apache-2.0
// Checks if the queries of a batch can be computed as a decode step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/page_table.hpp"
#include "kernels/attention/key_positions.hpp"
#include "kernels/attention/visibility.hpp"

namespace ringattn {

// True if every sequence has the same number of queries, and decode kernels support that number.
bool are_decode_steps(const SequenceList& sequences);
// True if queries are the last tokens of their sequences.
bool queries_end_keys(const SequenceList& sequences);
// True if all sequences have the same number of keys.
bool are_equally_long(const SequenceList& sequences);
// Pages of 64 tokens for a cache of sequences of unequal lengths. A dense cache would need the longest length for each.
// Null if the table would have too many entries.
std::shared_ptr<const PageTable> pages_of_unequal(const Batch& batch);
// The same sequences, but queries after all keys that see every key are moved to the end of the keys, which changes
// nothing that they see.
SequenceList aligned_to_end(const SequenceList& sequences, const Mask& mask);

struct QueryWithoutKey {
  std::size_t sequence;
  std::int64_t position;
};
// The first query that sees no key of some head, because all keys before it were evicted.
std::optional<QueryWithoutKey> first_without_key(const Batch& batch, const KeyPositions& positions);

}  // namespace ringattn
