// SPDX-License-Identifier: Apache-2.0
#include "attention/job/step_forecast.hpp"

#include <algorithm>
#include <numeric>

#include "attention/job/rank_cache.hpp"
#include "attention/tokens/cost.hpp"
#include "attention/tokens/group_deal.hpp"
#include "kernels/cache_share.hpp"
#include "kernels/merge.hpp"

namespace ringattn {

std::int64_t StepForecast::bytes_moved() const {
  return std::accumulate(received.begin(), received.end(), std::int64_t{0});
}

double StepForecast::balance() const {
  const double all = std::accumulate(keys.begin(), keys.end(), 0.0);
  const auto most = static_cast<double>(*std::max_element(keys.begin(), keys.end()));
  return all > 0.0 ? most * static_cast<double>(keys.size()) / all : 1.0;
}

StepForecast forecast_step(const JobInput& input, const DecodeKernel& kernel, int ranks, const CacheFormat& format,
                           const LatentProducts& products) {
  const Batch& batch = input.job().batch;
  StepForecast forecast;
  forecast.key_tile = kernel.key_tile();
  forecast.group_keys = std::int64_t{kGroupTiles} * forecast.key_tile;
  forecast.job = decode_job(input, ranks, forecast.key_tile, format);
  check_decode_job(forecast.job);
  const DecodeLimits& limits = forecast.job.limits;
  const int dealt = ranks_of_sequence(forecast.job.spec, ranks);
  kernel.check(limits, dealt);
  forecast.groups = share_groups(limits.keys, 1, forecast.key_tile);
  forecast.memory = decode_memory(forecast.job, kernel, ranks);
  if (input.op() == Op::kLatent) {
    forecast.memory = latent_decode_memory(forecast.memory, input.latent().spec, limits, products);
  }
  forecast.bytes_read = decode_bytes(input, kernel, format);
  const std::int64_t groups = share_groups(limits.keys, dealt, forecast.key_tile);
  for (int rank = 0; rank < ranks; ++rank) {
    const SequenceRange owned = owned_sequences(limits.sequences, rank, ranks);
    std::int64_t keys = 0;
    for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
      const auto number = static_cast<std::int64_t>(s);
      if (dealt < ranks && (number < owned.first || number >= owned.end())) continue;
      keys += keys_of_share(share_of_rank(rank % dealt, dealt), forecast.group_keys, batch.sequences[s].k_len);
    }
    forecast.keys.push_back(keys);
    forecast.rows.push_back(owned.count * limits.rows);
    forecast.received.push_back(
        static_cast<std::int64_t>(partial_bytes(forecast.job.spec, kernel, forecast.rows.back(), groups)) *
        (dealt - 1));
  }
  return forecast;
}

}  // namespace ringattn
