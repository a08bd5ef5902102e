// SPDX-License-Identifier: Apache-2.0
#include "attention/world_forecast.hpp"

#include <algorithm>
#include <numeric>

namespace ringattn {

double WorldForecast::flops() const { return std::accumulate(rank_flops.begin(), rank_flops.end(), 0.0); }

double WorldForecast::balance() const {
  const double mean = flops() / world();
  return mean > 0.0 ? *std::max_element(rank_flops.begin(), rank_flops.end()) / mean : 1.0;
}

double WorldForecast::flops_per_second_per_rank() const { return seconds > 0.0 ? flops() / seconds / world() : 0.0; }

WorldForecast forecast_world(const RingJob& job, const Options& options, Route route, int world) {
  const Forecasts forecasts(job, options, route, world);
  WorldForecast sum{job.work.batch.q_tokens(), forecasts.layout()};
  for (int rank = 0; rank < world; ++rank) {
    const Plan plan = forecasts.plan(rank);
    const Prediction prediction = predict(plan, options.machine, options.overlap);
    sum.blocks.resize(plan.blocks.size());
    for (std::size_t b = 0; b < plan.blocks.size(); ++b) {
      const BlockPlan& from = plan.blocks[b];
      BlockForecast& to = sum.blocks[b];
      to.first_token = from.first_token;
      to.last_token = from.last_token;
      to.flops += from.flops;
      to.most_flops = std::max(to.most_flops, from.flops);
      to.bytes_received += from.bytes_received;
      to.most_bytes_received = std::max(to.most_bytes_received, from.bytes_received);
    }
    sum.rank_flops.push_back(plan.flops());
    sum.bytes_received += plan.bytes_received();
    sum.most_bytes_received = std::max(sum.most_bytes_received, plan.bytes_received());
    sum.most_memory = std::max(sum.most_memory, plan.memory_bytes);
    sum.seconds = std::max(sum.seconds, prediction.seconds);
    sum.exposed_seconds = std::max(sum.exposed_seconds, prediction.exposed_seconds);
  }
  return sum;
}

}  // namespace ringattn
