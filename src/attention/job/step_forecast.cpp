// SPDX-License-Identifier: Apache-2.0
#include "attention/job/step_forecast.hpp"

#include <algorithm>
#include <numeric>

#include "attention/job/listed_keys.hpp"
#include "attention/job/rank_cache.hpp"
#include "attention/tokens/cost.hpp"
#include "kernels/cache_share.hpp"

namespace ringattn {

std::int64_t StepForecast::bytes_moved() const {
  return std::accumulate(received.begin(), received.end(), std::int64_t{0});
}

double StepForecast::balance() const {
  const double all = std::accumulate(folded.begin(), folded.end(), 0.0);
  const auto most = static_cast<double>(*std::max_element(folded.begin(), folded.end()));
  return all > 0.0 ? most * static_cast<double>(folded.size()) / all : 1.0;
}

int StepForecast::idle() const { return static_cast<int>(std::ranges::count(folded, 0)); }

StepForecast forecast_step(const JobInput& input, const DecodeKernel& kernel, int ranks, const CacheFormat& format,
                           const LatentProducts& products) {
  const Batch& batch = input.job().batch;
  StepForecast forecast;
  forecast.key_tile = kernel.key_tile();
  forecast.group_keys = kernel.group_keys();
  forecast.job = decode_job(input, ranks, kernel, format);
  check_decode_job(forecast.job);
  const DecodeLimits& limits = forecast.job.limits;
  forecast.deal = deal_of(forecast.job, ranks);
  kernel.check(largest_part(forecast.job, ranks).limits, forecast.deal.groups);
  forecast.groups = share_groups(limits.keys, 1, forecast.group_keys);
  forecast.memory = decode_memory(forecast.job, kernel, ranks);
  if (input.op() == Op::kLatent) {
    forecast.memory = latent_decode_memory(forecast.memory, input.latent().spec, limits, products);
  }
  forecast.bytes_read = decode_bytes(input, kernel, format);
  const FoldSpec& spec = forecast.job.spec;
  const std::vector<std::int64_t> listed = listed_keys(input.job());
  const RowRecords records = row_records(forecast.job, kernel, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const SequenceRange kept = kept_sequences(forecast.deal, limits.sequences, rank);
    const HeadRange heads = kept_heads(forecast.deal, spec, rank);
    std::int64_t keys = 0;
    for (std::int64_t s = kept.first; s < kept.end(); ++s) {
      const std::int64_t length = batch.sequences[static_cast<std::size_t>(s)].k_len;
      keys += keys_of_share(kept_share(forecast.deal, rank), forecast.group_keys, length);
    }
    forecast.keys.push_back(keys);
    forecast.kv_heads.push_back(heads.count);
    forecast.folded.push_back(listed.empty() ? keys * heads.count
                                             : folded_keys(listed, input.job(), forecast.deal, rank));
    forecast.rows.push_back(owned_sequences(limits.sequences, rank, ranks).count * limits.rows);
    std::int64_t received = 0;
    const int first = first_of_part(forecast.deal, rank);
    for (int peer = first; peer < first + forecast.deal.heads * forecast.deal.groups; ++peer) {
      if (peer == rank) continue;
      received += forecast.rows.back() * records.groups * records.bytes[static_cast<std::size_t>(peer)];
    }
    forecast.received.push_back(received);
  }
  return forecast;
}

}  // namespace ringattn
