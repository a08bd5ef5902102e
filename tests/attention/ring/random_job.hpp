// SPDX-License-Identifier: Apache-2.0
// Random jobs for property tests: everything that a plan depends on, drawn from a seed.
#pragma once

#include <cstdint>
#include <random>
#include <string>

#include "attention/ring/plan.hpp"
#include "attention/ring/ring_work.hpp"
#include "attention/tokens/job.hpp"

namespace ringattn::testing {

// Draws the same numbers with every standard library.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}

  // In [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  // In [1, high], of every order of magnitude.
  std::int64_t size(std::int64_t high);
  bool chance(int percent) { return between(1, 100) <= percent; }

 private:
  std::mt19937_64 engine_;
};

struct RandomJob {
  Job job;
  int world = 1;
  LayoutRequest request;
  KernelShape kernel;
  MachineModel machine;
  PlanOptions options;
  RowStreams query_streams;  // if queries travel, too
  double query_pair_flops = 0.0;
  double query_flops = 0.0;

  RingWork work() const;
  JobLayout layout() const { return make_layout(job, world, request, kernel.query_tile, kernel.key_tile); }
  std::string description() const;
};

// A job of at most about `max_tokens` tokens on 1 … `max_ranks` ranks. The memory budget is not set.
RandomJob random_job(std::uint64_t seed, std::int64_t max_tokens, int max_ranks);
// The same job with queries that travel to keys, beside keys to queries. Most sequences get another q_offset, and the
// key tile is a multiple of the query tile. There is no block mask.
RandomJob random_job_of_both_directions(std::uint64_t seed, std::int64_t max_tokens, int max_ranks);

// A layout whose runs a caller might state: any cut of the tokens, dealt at random; queries and keys on their own.
JobLayout stated_layout(const Job& job, int world, std::uint64_t seed);

}  // namespace ringattn::testing
