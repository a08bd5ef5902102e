// SPDX-License-Identifier: Apache-2.0
// Runs a forward and a backward pass through the library in a world of threads and returns packed gradients, for tests
// that compare worlds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/attention_backward/attention_backward.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

// Packed inputs of a backward pass: dense arrays.
struct BackwardTensors {
  JobTensors forward;
  std::vector<std::byte> out;   // O and LSE of the forward
  std::vector<float> lse;       // [q_tokens, heads]
  std::vector<std::byte> dout;  // as out
  std::vector<float> dlse;      // as lse; empty: 0
};

// Random inputs, with O and LSE of the CPU's forward on one rank; the same for the same seed.
BackwardTensors random_backward_tensors(const Job& job, std::uint64_t seed);

struct BackwardResult {
  std::vector<std::byte> dq;
  std::vector<std::byte> dk;
  std::vector<std::byte> dv;
  std::vector<std::vector<float>> dsinks;  // [ranks][heads]
  std::vector<RunStats> stats;             // per rank

  // The name of the first gradient whose bits differ. Empty: all are equal, dsinks on every rank.
  std::string difference(const BackwardResult& other) const;
};

BackwardResult poisoned_backward_result(const BackwardJob& job, int world);

// One rank's part: shards the packed tensors, runs, and puts its rows into `result`, whose arrays have their full size.
// `enqueues`: two runs, by enqueue() and wait().
void run_backward_rank(const BackwardJob& job, const Options& options, const BackwardTensors& tensors,
                       Transport& transport, BackwardResult& result, bool enqueues = false);

// A world of `world` threads (self for 1).
BackwardResult run_backward(const BackwardJob& job, const Options& options, const BackwardTensors& tensors, int world,
                            const ThreadsDelivery& delivery = {}, bool enqueues = false);

// A world on this host's GPUs, as in run_gpu_world().
BackwardResult run_gpu_backward(const BackwardJob& job, const Options& options, const BackwardTensors& tensors,
                                int world, bool enqueues = false);

}  // namespace ringattn::testing
