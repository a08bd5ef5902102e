// SPDX-License-Identifier: Apache-2.0
// How ranks deal the work of decoding: each keeps every P-th group of every sequence's keys, and owns the rows of some
// sequences; with lists of key blocks, it keeps all keys of those. Pure: no ranks run here.
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

// Among how many ranks the groups of a sequence are dealt. Those of a list hold keys from anywhere in the sequence, and
// a group is folded by one rank: so with lists each sequence is one rank's, and ranks share out the sequences alone.
inline int ranks_of_sequence(const FoldSpec& spec, int ranks) { return spec.lists.any() ? 1 : ranks; }

// The share of rank `rank` of `ranks`.
inline GroupShare share_of_rank(int rank, int ranks) { return {rank, ranks}; }

// The sequences whose rows rank `rank` merges, and gives: neighbours, in order of rank, as many for each as can be.
// With fewer sequences than ranks some have none.
inline SequenceRange owned_sequences(std::int64_t sequences, int rank, int ranks) {
  const std::int64_t first = sequences * rank / ranks;
  return {first, sequences * (rank + 1) / ranks - first};
}

}  // namespace ringattn
