// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/decode_rows.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/decode/decode.hpp"

namespace ringattn {

bool are_decode_steps(const SequenceList& sequences) {
  for (std::size_t i = 0; i < sequences.distinct(); ++i) {
    const Sequence& s = sequences[i];
    if (s.q_len != sequences[0].q_len || s.k_len > std::numeric_limits<std::int32_t>::max()) return false;
  }
  return !sequences.empty() && sequences[0].q_len >= 1 && sequences[0].q_len <= kMaxDecodeRows;
}

bool queries_end_keys(const SequenceList& sequences) {
  for (std::size_t i = 0; i < sequences.distinct(); ++i) {
    if (sequences[i].q_offset + sequences[i].q_len != sequences[i].k_len) return false;
  }
  return true;
}

bool are_equally_long(const SequenceList& sequences) {
  for (std::size_t i = 0; i < sequences.distinct(); ++i) {
    if (sequences[i].k_len != sequences[0].k_len) return false;
  }
  return true;
}

std::shared_ptr<const PageTable> pages_of_unequal(const Batch& batch) {
  constexpr std::int64_t kPageSize = 64;
  const auto count = static_cast<std::int64_t>(batch.sequences.size());
  std::int64_t longest = 1;
  for (const Sequence& s : batch.sequences) longest = std::max(longest, s.k_len);
  if (pages_of(longest, kPageSize) > kMaxTableEntries / count) return nullptr;
  if (batch.k_tokens() / kPageSize + count > kMaxPageEntries) return nullptr;
  return std::make_shared<const PageTable>(deal_pages(batch, kPageSize, 0));
}

SequenceList aligned_to_end(const SequenceList& sequences, const Mask& mask) {
  std::vector<Sequence> moved(sequences.begin(), sequences.end());
  for (Sequence& s : moved) {
    const bool alone_behind = s.q_len == 1 && s.q_offset >= s.k_len - 1 && mask.left < 0;
    if (mask.is_full() || alone_behind) s.q_offset = s.k_len - s.q_len;
  }
  return moved;
}

std::optional<QueryWithoutKey> first_without_key(const Batch& batch, const KeyPositions& positions) {
  for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
    const Sequence& sequence = batch.sequences[s];
    const std::int64_t whole = positions.sequences()[s].whole;
    if (sequence.q_offset >= whole) continue;
    const std::int64_t begin = std::max<std::int64_t>(0, sequence.q_offset);
    const std::int64_t end = std::min(whole, sequence.q_offset + sequence.q_len);
    if (const auto position = first_gap(positions, s, begin, end)) return QueryWithoutKey{s, *position};
  }
  return std::nullopt;
}

}  // namespace ringattn
