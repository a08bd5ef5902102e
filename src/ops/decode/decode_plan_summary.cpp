// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/decode_plan_summary.hpp"

#include <algorithm>
#include <numeric>

#include "attention/tokens/cost.hpp"
#include "kernels/decode/cache_partition.hpp"
#include "ops/decode/keys_per_mask_row.hpp"
#include "ops/decode/rank_cache.hpp"

namespace ringattn {

std::int64_t DecodePlanSummary::bytes_moved() const {
  return std::accumulate(received.begin(), received.end(), std::int64_t{0});
}

double DecodePlanSummary::balance() const {
  const double all = std::accumulate(attended.begin(), attended.end(), 0.0);
  const auto most = static_cast<double>(*std::max_element(attended.begin(), attended.end()));
  return all > 0.0 ? most * static_cast<double>(attended.size()) / all : 1.0;
}

int DecodePlanSummary::idle() const { return static_cast<int>(std::ranges::count(attended, 0)); }

DecodePlanSummary summarize_decode_plan(const JobInput& input, const DecodeKernel& kernel, int ranks,
                                        const CacheFormat& format, const MlaGemms& gemms) {
  const Batch& batch = input.job().batch;
  DecodePlanSummary summary;
  summary.key_tile = kernel.key_tile();
  summary.kv_split_keys = kernel.kv_split_keys();
  summary.job = decode_job(input, ranks, kernel, format);
  check_decode_job(summary.job);
  const DecodeLimits& limits = summary.job.limits;
  summary.deal = deal_of(summary.job, ranks);
  kernel.check(largest_rank_job(summary.job, ranks).limits, summary.deal.kv_splits);
  summary.kv_splits = splits_per_partition(limits.keys, 1, summary.kv_split_keys);
  summary.memory = decode_memory(summary.job, kernel, ranks);
  if (const MlaJob* const mla = input.mla()) {
    summary.memory = mla_decode_memory(summary.memory, mla->spec, limits, gemms);
  }
  summary.bytes_read = decode_bytes(input, kernel, format);
  const AttentionSpec& spec = summary.job.spec;
  const std::vector<std::int64_t> listed = keys_per_mask_row(input.job());
  const RowPartials records = row_partials(summary.job, kernel, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const SequenceRange kept = kept_sequences(summary.deal, limits.sequences, rank);
    const HeadRange heads = kept_heads(summary.deal, spec, rank);
    std::int64_t keys = 0;
    for (std::int64_t s = kept.first; s < kept.end(); ++s) {
      const std::int64_t length = batch.sequences[static_cast<std::size_t>(s)].k_len;
      keys += keys_of_partition(kept_partition(summary.deal, rank), summary.kv_split_keys, length);
    }
    summary.keys.push_back(keys);
    summary.kv_heads.push_back(heads.count);
    summary.attended.push_back(listed.empty() ? keys * heads.count
                                              : attended_keys(listed, input.job(), summary.deal, rank));
    summary.rows.push_back(owned_sequences(limits.sequences, rank, ranks).count * limits.rows);
    std::int64_t received = 0;
    const int first = first_of_part(summary.deal, rank);
    for (int peer = first; peer < first + summary.deal.heads * summary.deal.kv_splits; ++peer) {
      if (peer == rank) continue;
      received += summary.rows.back() * records.splits * records.bytes[static_cast<std::size_t>(peer)];
    }
    summary.received.push_back(received);
  }
  return summary;
}

}  // namespace ringattn
