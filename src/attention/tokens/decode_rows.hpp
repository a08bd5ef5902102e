// SPDX-License-Identifier: Apache-2.0
// Whether the queries of sequences are rows of a decoding step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/page_table.hpp"
#include "kernels/key_positions.hpp"
#include "kernels/visibility.hpp"

namespace ringattn {

// Whether every sequence has as many rows, and no more than decode kernels take.
bool are_decode_steps(const SequenceList& sequences);
// Whether queries are the last tokens of their sequences.
bool queries_end_keys(const SequenceList& sequences);
// Whether all have as many keys.
bool are_equally_long(const SequenceList& sequences);
// Pages of 64 tokens for a cache of the others, each of which would have the longest one's memory without pages. Null
// where the table would have too many entries.
std::shared_ptr<const PageTable> pages_of_unequal(const Batch& batch);
// Rows that see every key, and would from the end of these as well, stand there.
SequenceList aligned_to_end(const SequenceList& sequences, const Mask& mask);

struct QueryWithoutKey {
  std::size_t sequence;
  std::int64_t position;
};
// The first query that stands, among the tokens that its sequence had, where some head has no key any more.
std::optional<QueryWithoutKey> first_without_key(const Batch& batch, const KeyPositions& positions);

}  // namespace ringattn
