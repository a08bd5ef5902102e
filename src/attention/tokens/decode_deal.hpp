// SPDX-License-Identifier: Apache-2.0
// How ranks partition decode. Each rank owns the sequences whose results it gets. Its part is what it keeps in its
// cache and attends to, for all query tokens: a range of the sequences, a range of their K/V heads, and every n-th KV
// split of those.
//
// Without a block mask ranks partition KV splits. With a block mask, a KV split has 64 of the mask's key tiles, from
// anywhere in the sequence, and is computed as a whole. A rank then keeps all keys of a head, and ranks partition
// sequences and K/V heads, which share no KV split. Pure: no ranks run here.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "kernels/decode/decode.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

// Sequences [first, first + count) of a step.
struct SequenceRange {
  std::int64_t first = 0;
  std::int64_t count = 0;

  std::int64_t end() const { return first + count; }
  bool operator==(const SequenceRange&) const = default;
};

// The number of parts along each axis. Ranks with the same sequences are adjacent.
struct DecodeDeal {
  int sequences = 1;
  int heads = 1;
  int kv_splits = 1;

  int ranks() const { return sequences * heads * kv_splits; }
  // True if ranks send partials or results to the owners of the rows.
  bool exchanges_records() const { return heads > 1 || kv_splits > 1; }
  bool operator==(const DecodeDeal&) const = default;
};

// Maximum number of parts into which the K/V heads are divided. If there are several masks, heads that share one stay
// together. If a step selects one mask for all heads (`selects_blocks`), all stay together.
int max_head_parts(const AttentionSpec& spec, bool selects_blocks);

// How `ranks` ranks partition decode steps. most(deal) is the work of the rank with the most work. Without a block
// mask, KV splits are partitioned. With one, sequences are partitioned, which needs no exchange, and then heads: a
// number of head parts is chosen only if it reduces the largest rank's work by a tenth or more.
DecodeDeal deal_decode(const AttentionSpec& spec, bool selects_blocks, int ranks,
                       const std::function<std::int64_t(const DecodeDeal&)>& most);
// The same for up to `sequences` sequences of equal work.
DecodeDeal deal_decode(const AttentionSpec& spec, bool selects_blocks, std::int64_t sequences, int ranks);

// The partitioned axes: "KV splits" (also with one rank), "K/V heads", "sequences" or "sequences and K/V heads".
std::string_view deal_name(const DecodeDeal& deal);

// The sequences whose rows rank `rank` merges and outputs: contiguous, in order of rank, and
// balanced. With fewer sequences than ranks some ranks have none.
inline SequenceRange owned_sequences(std::int64_t sequences, int rank, int ranks) {
  const std::int64_t first = sequences * rank / ranks;
  return {first, sequences * (rank + 1) / ranks - first};
}

// The part of rank `rank` in a step of `sequences` sequences: those that the ranks of its part
// own.
SequenceRange kept_sequences(const DecodeDeal& deal, std::int64_t sequences, int rank);
HeadRange kept_heads(const DecodeDeal& deal, const AttentionSpec& spec, int rank);
KvPartition kept_partition(const DecodeDeal& deal, int rank);
// The first of the ranks that keep the same sequences. DecodeDeal::heads · kv_splits adjacent
// ranks keep them.
int first_of_part(const DecodeDeal& deal, int rank);

// The spec with only these K/V heads and their query heads and block masks.
AttentionSpec spec_of_heads(const AttentionSpec& spec, const HeadRange& kv_heads);
// The query heads of these K/V heads.
HeadRange query_heads(const AttentionSpec& spec, const HeadRange& kv_heads);

}  // namespace ringattn
