// SPDX-License-Identifier: Apache-2.0
// How ranks deal the work of decoding. Each owns the rows of some sequences. What of the keys it keeps and folds, for
// all rows that see them, is a part: neighbouring sequences, of these neighbouring K/V heads, and of these every n-th
// group of keys.
//
// Groups are dealt where there are no lists of key blocks. A list's group holds 64 of its tiles, from anywhere in the
// sequence, and is folded in one go: so with lists a rank keeps all keys of a head, and heads are dealt, which share no
// group; and sequences, which share nothing. Pure: no ranks run here.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "kernels/decode.hpp"
#include "kernels/ssm.hpp"

namespace ringattn {

// Sequences [first, first + count) of a step.
struct SequenceRange {
  std::int64_t first = 0;
  std::int64_t count = 0;

  std::int64_t end() const { return first + count; }
  bool operator==(const SequenceRange&) const = default;
};

// Into how many parts each is cut. Ranks that have the same sequences are neighbours.
struct DecodeDeal {
  int sequences = 1;
  int heads = 1;
  int kv_splits = 1;

  int ranks() const { return sequences * heads * kv_splits; }
  // Whether ranks have something of rows to give to those that own them.
  bool gives() const { return heads > 1 || kv_splits > 1; }
  bool operator==(const DecodeDeal&) const = default;
};

// Into how many parts K/V heads can be dealt, at most. Heads that share one of several lists stay together, and all do
// where a step chooses one list for them (`chooses`).
int max_head_parts(const AttentionSpec& spec, bool chooses);

// How `ranks` ranks deal steps, where `most` says how much the rank has to fold that has most. Without lists kv_splits
// are dealt. With them sequences, for which nothing has to travel, and heads, in as many parts as each take a tenth and
// more off the rank with most.
DecodeDeal deal_decode(const AttentionSpec& spec, bool chooses, int ranks,
                       const std::function<std::int64_t(const DecodeDeal&)>& most);
// The same of up to so many sequences, of which nothing else is known: the K/V heads of all of them are to be folded.
DecodeDeal deal_decode(const AttentionSpec& spec, bool chooses, std::int64_t sequences, int ranks);

// "groups", "K/V heads", "sequences" or "sequences and K/V heads": what is dealt. By one rank: "groups".
std::string_view deal_name(const DecodeDeal& deal);

// The sequences whose rows rank `rank` merges, and gives: neighbours, in order of rank, as many for each as can be.
// With fewer sequences than ranks some have none.
inline SequenceRange owned_sequences(std::int64_t sequences, int rank, int ranks) {
  const std::int64_t first = sequences * rank / ranks;
  return {first, sequences * (rank + 1) / ranks - first};
}

// The part of rank `rank`, of a step of so many sequences: those that it and its neighbours in the part own.
SequenceRange kept_sequences(const DecodeDeal& deal, std::int64_t sequences, int rank);
HeadRange kept_heads(const DecodeDeal& deal, const AttentionSpec& spec, int rank);
KvPartition kept_partition(const DecodeDeal& deal, int rank);
// The first of the ranks that keep the same sequences; DecodeDeal::heads · kv_splits follow each other.
int first_of_part(const DecodeDeal& deal, int rank);

// What is computed of these K/V heads alone, with the query heads and lists that they have.
AttentionSpec spec_of_heads(const AttentionSpec& spec, const HeadRange& kv_heads);
// The query heads of these K/V heads.
HeadRange query_heads(const AttentionSpec& spec, const HeadRange& kv_heads);

}  // namespace ringattn
