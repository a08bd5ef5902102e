// SPDX-License-Identifier: Apache-2.0
// Runs a whole job of latent attention through the library, in a world of threads or as one rank, and gives back packed
// results, for tests that compare worlds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/latent.hpp"
#include "comm/threads.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

// Packed inputs of a job: dense arrays, shapes as of LatentInputs.
struct LatentTensors {
  std::vector<std::byte> q;
  std::vector<std::byte> latent;
  std::vector<std::byte> k_rope;
  std::vector<std::byte> w_uk;
  std::vector<std::byte> w_uv;
  std::vector<float> sinks;
  std::vector<std::byte> packed;  // of a job of LatentJob::format: rows of 8 bits, read instead of latent and k_rope
};

// Standard normal values (matrices: divided by √latent_dim), rounded to the job's dtype; the same for the same seed.
LatentTensors random_latents(const LatentJob& job, std::uint64_t seed);

// The same with latents packed into rows of 8 bits, and the numbers that those are unpacked to as latent and k_rope.
LatentTensors with_packed_latents(const LatentSpec& spec, LatentTensors tensors);

// How a rank holds its inputs and wants its outputs. In the latent there is no w_uk or no w_uv: `q` of the tensors is
// [q_tokens, heads, latent_dim + rope_dim] then, and out [q_tokens, heads, latent_dim].
struct LatentShape {
  bool fused = false;  // latent and k_rope are views of one tensor with a gap behind its rows, as rows of 8 bits have
                       // one, and w_uk and w_uv of one [heads, head_dim + head_dim_v, latent_dim]
  bool q_in_latent = false;
  bool out_in_latent = false;
};

LatentOptions on_the_cpu(int threads = 1);

// The packed matrices of a job.
HeadMatrices matrices_of(const std::vector<std::byte>& packed, const LatentSpec& spec, int outer);

// A result of the job's size, filled with NaN patterns so that unwritten rows are seen.
JobResult poisoned_latent_result(const LatentJob& job, int world, const LatentShape& shape = {});

// One rank's part: shards the packed tensors, runs, and puts its rows into `result`, whose arrays have their full size.
void run_latent_rank(const LatentJob& job, const LatentOptions& options, const LatentTensors& tensors,
                     Transport& transport, JobResult& result, const LatentShape& shape = {});

// A world of `world` threads (self for 1).
JobResult run_latent_job(const LatentJob& job, const LatentOptions& options, const LatentTensors& tensors, int world,
                         const LatentShape& shape = {}, const ThreadsDelivery& delivery = {});

// On the GPUs that there are: alone for a world of 1, else `world` ranks of this process, which share GPUs where there
// are too few.
JobResult run_gpu_latent_job(const LatentJob& job, const LatentOptions& options, const LatentTensors& tensors,
                             int world, const LatentShape& shape = {});

}  // namespace ringattn::testing
