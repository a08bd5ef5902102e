// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/decode_deal.hpp"

#include <algorithm>

namespace ringattn {

namespace {

int ranks_of_part(const DecodeDeal& deal) { return deal.heads * deal.kv_splits; }

}  // namespace

int max_head_parts(const AttentionSpec& spec, bool selects_blocks) {
  if (spec.block_mask.heads > 1) return std::min(spec.block_mask.heads, spec.kv_heads);
  return selects_blocks ? 1 : spec.kv_heads;
}

DecodeDeal deal_decode(const AttentionSpec& spec, bool selects_blocks, int ranks,
                       const std::function<std::int64_t(const DecodeDeal&)>& most) {
  if (!spec.block_mask.any()) return {1, 1, ranks};
  DecodeDeal best{ranks, 1, 1};
  std::int64_t min_work = most(best);
  for (int heads = 2; heads <= std::min(max_head_parts(spec, selects_blocks), ranks); ++heads) {
    if (ranks % heads != 0) continue;
    const DecodeDeal deal{ranks / heads, heads, 1};
    const std::int64_t work = most(deal);
    if (10 * work > 9 * min_work) continue;
    best = deal;
    min_work = work;
  }
  return best;
}

DecodeDeal deal_decode(const AttentionSpec& spec, bool selects_blocks, std::int64_t sequences, int ranks) {
  return deal_decode(spec, selects_blocks, ranks, [&](const DecodeDeal& deal) {
    return kept_sequences(deal, sequences, ranks - 1).count * kept_heads(deal, spec, ranks - 1).count;
  });
}

std::string_view deal_name(const DecodeDeal& deal) {
  if (deal.heads == 1) return deal.sequences == 1 ? "KV splits" : "sequences";
  return deal.sequences == 1 ? "K/V heads" : "sequences and K/V heads";
}

int first_of_part(const DecodeDeal& deal, int rank) { return rank / ranks_of_part(deal) * ranks_of_part(deal); }

SequenceRange kept_sequences(const DecodeDeal& deal, std::int64_t sequences, int rank) {
  return owned_sequences(sequences, rank / ranks_of_part(deal), deal.sequences);
}

HeadRange kept_heads(const DecodeDeal& deal, const AttentionSpec& spec, int rank) {
  // K/V heads that share a block mask are adjacent.
  const int together = spec.block_mask.heads > 1 ? std::max(1, spec.kv_heads / spec.block_mask.heads) : 1;
  const int units = spec.kv_heads / together;
  const int part = rank / deal.kv_splits % deal.heads;
  const int first = units * part / deal.heads;
  return {first * together, (units * (part + 1) / deal.heads - first) * together};
}

KvPartition kept_partition(const DecodeDeal& deal, int rank) { return {rank % deal.kv_splits, deal.kv_splits}; }

HeadRange query_heads(const AttentionSpec& spec, const HeadRange& kv_heads) {
  const int each = spec.heads / spec.kv_heads;
  return {kv_heads.first * each, kv_heads.count * each};
}

AttentionSpec spec_of_heads(const AttentionSpec& spec, const HeadRange& kv_heads) {
  AttentionSpec of = spec;
  of.heads = query_heads(spec, kv_heads).count;
  of.kv_heads = kv_heads.count;
  if (spec.block_mask.heads > 1) of.block_mask.heads = spec.block_mask.heads * kv_heads.count / spec.kv_heads;
  return of;
}

}  // namespace ringattn
