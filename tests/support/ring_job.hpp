// SPDX-License-Identifier: Apache-2.0
// Runs a whole job through the library in a world of threads and returns packed results, for tests that compare
// worlds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "comm/threads.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "ops/attention/attention.hpp"

namespace ringattn::testing {

// Packed inputs of a job: dense [tokens, heads, dim] arrays.
struct JobTensors {
  std::vector<std::byte> q;
  std::vector<std::byte> k;
  std::vector<std::byte> v;
  std::vector<float> sinks;
};

// Standard normal values, rounded to the job's dtype; the same for the same seed.
JobTensors random_tensors(const Job& job, std::uint64_t seed);

struct JobResult {
  std::vector<std::byte> out;   // [q_tokens, heads, head_dim_v]
  std::vector<float> lse;       // [q_tokens, heads]
  std::vector<RunStats> stats;  // per rank

  // Whether every byte is equal, NaN patterns and signs of zero included.
  bool same_bits(const JobResult& other) const;
};

// One rank's part: shards the packed tensors, runs, and puts its rows into `result`, whose arrays have their full size.
void run_rank(const Job& job, const Options& options, const JobTensors& tensors, Transport& transport,
              JobResult& result);

// A world of `world` threads (self for 1).
JobResult run_job(const Job& job, const Options& options, const JobTensors& tensors, int world,
                  const ThreadsDelivery& delivery = {});

// Every rank's part of a world on this host's GPUs: a single rank, or `world` ranks of this process, which share GPUs
// if there are too few, over a transport of the table. Throws the error with which the world failed.
void run_gpu_world(int world, const std::function<void(Transport&)>& rank_main, std::string_view transport = "auto");

// A job in such a world.
JobResult run_gpu_job(const Job& job, const Options& options, const JobTensors& tensors, int world,
                      std::string_view transport = "auto");

// A result of the job's size, filled with NaN patterns so that unwritten rows are seen.
JobResult poisoned_result(const Job& job, int world);

}  // namespace ringattn::testing
