// SPDX-License-Identifier: Apache-2.0
// How ranks deal the work of decoding: each keeps every P-th group of every sequence's keys, and owns the rows of some
// sequences. Pure: no ranks run here.
#pragma once

#include <cstdint>

#include "kernels/decode.hpp"

namespace ringattn {

// Sequences [first, first + count) of a step.
struct SequenceRange {
  std::int64_t first = 0;
  std::int64_t count = 0;

  std::int64_t end() const { return first + count; }
  bool operator==(const SequenceRange&) const = default;
};

// The share of rank `rank` of `ranks`.
inline GroupShare share_of_rank(int rank, int ranks) { return {rank, ranks}; }

// The sequences whose rows rank `rank` merges, and gives: neighbours, in order of rank, as many for each as can be.
// With fewer sequences than ranks some have none.
inline SequenceRange owned_sequences(std::int64_t sequences, int rank, int ranks) {
  const std::int64_t first = sequences * rank / ranks;
  return {first, sequences * (rank + 1) / ranks - first};
}

}  // namespace ringattn
