// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/step_deal.hpp"

#include <algorithm>

namespace ringattn {

namespace {

int ranks_of_part(const StepDeal& deal) { return deal.heads * deal.groups; }

}  // namespace

int most_head_parts(const FoldSpec& spec, bool chooses) {
  if (spec.lists.heads > 1) return std::min(spec.lists.heads, spec.kv_heads);
  return chooses ? 1 : spec.kv_heads;
}

StepDeal deal_step(const FoldSpec& spec, bool chooses, int ranks,
                   const std::function<std::int64_t(const StepDeal&)>& most) {
  if (!spec.lists.any()) return {1, 1, ranks};
  StepDeal best{ranks, 1, 1};
  std::int64_t least = most(best);
  for (int heads = 2; heads <= std::min(most_head_parts(spec, chooses), ranks); ++heads) {
    if (ranks % heads != 0) continue;
    const StepDeal deal{ranks / heads, heads, 1};
    const std::int64_t here = most(deal);
    if (10 * here > 9 * least) continue;
    best = deal;
    least = here;
  }
  return best;
}

StepDeal deal_step(const FoldSpec& spec, bool chooses, std::int64_t sequences, int ranks) {
  return deal_step(spec, chooses, ranks, [&](const StepDeal& deal) {
    return kept_sequences(deal, sequences, ranks - 1).count * kept_heads(deal, spec, ranks - 1).count;
  });
}

std::string_view deal_name(const StepDeal& deal) {
  if (deal.heads == 1) return deal.sequences == 1 ? "groups" : "sequences";
  return deal.sequences == 1 ? "K/V heads" : "sequences and K/V heads";
}

int first_of_part(const StepDeal& deal, int rank) { return rank / ranks_of_part(deal) * ranks_of_part(deal); }

SequenceRange kept_sequences(const StepDeal& deal, std::int64_t sequences, int rank) {
  return owned_sequences(sequences, rank / ranks_of_part(deal), deal.sequences);
}

HeadRange kept_heads(const StepDeal& deal, const FoldSpec& spec, int rank) {
  // Heads that share one of several lists follow each other.
  const int together = spec.lists.heads > 1 ? std::max(1, spec.kv_heads / spec.lists.heads) : 1;
  const int units = spec.kv_heads / together;
  const int part = rank / deal.groups % deal.heads;
  const int first = units * part / deal.heads;
  return {first * together, (units * (part + 1) / deal.heads - first) * together};
}

GroupShare kept_share(const StepDeal& deal, int rank) { return {rank % deal.groups, deal.groups}; }

HeadRange query_heads(const FoldSpec& spec, const HeadRange& kv_heads) {
  const int each = spec.heads / spec.kv_heads;
  return {kv_heads.first * each, kv_heads.count * each};
}

FoldSpec spec_of_heads(const FoldSpec& spec, const HeadRange& kv_heads) {
  FoldSpec of = spec;
  of.heads = query_heads(spec, kv_heads).count;
  of.kv_heads = kv_heads.count;
  if (spec.lists.heads > 1) of.lists.heads = spec.lists.heads * kv_heads.count / spec.kv_heads;
  return of;
}

}  // namespace ringattn
