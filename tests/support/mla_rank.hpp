// SPDX-License-Identifier: Apache-2.0
// Runs a whole MLA job through the library, in a world of threads or as one rank, and returns packed
// results, for tests that compare worlds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/threads.hpp"
#include "ops/mla/mla.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

// Packed inputs of a job: dense arrays, shapes as of MlaInputs.
struct MlaTensors {
  std::vector<std::byte> q;
  std::vector<std::byte> latent;
  std::vector<std::byte> k_rope;
  std::vector<std::byte> w_uk;
  std::vector<std::byte> w_uv;
  std::vector<float> sinks;
  std::vector<std::byte> packed;  // of a job of MlaJob::format: FP8 rows, read instead of latent and k_rope
};

// Standard normal values (matrices: divided by √latent_dim), rounded to the job's dtype; the same for the same seed.
MlaTensors random_mla_tensors(const MlaJob& job, std::uint64_t seed);

// The same with latents quantized to FP8 rows, and with latent and k_rope dequantized from these rows.
MlaTensors with_fp8_latents(const MlaSpec& spec, MlaTensors tensors);

// How a rank stores its inputs and wants its outputs. In the latent space there is no w_uk, so the tensors' `q` is
// [q_tokens, heads, latent_dim + rope_dim], or no w_uv, so out is [q_tokens, heads, latent_dim].
struct MlaShape {
  bool fused = false;  // latent and k_rope are views of one tensor with a gap after its rows, as FP8 rows have
                       // one, and w_uk and w_uv of one [heads, head_dim + head_dim_v, latent_dim]
  bool q_in_latent = false;
  bool out_in_latent = false;
};

MlaOptions on_the_cpu(int threads = 1);

// The packed matrices of a job.
GemmWeights matrices_of(const std::vector<std::byte>& packed, const MlaSpec& spec, int dim_n);

// A result of the job's size, filled with NaN patterns so that unwritten rows are seen.
JobResult poisoned_mla_result(const MlaJob& job, int world, const MlaShape& shape = {});

// One rank's part: shards the packed tensors, runs, and puts its rows into `result`, whose arrays have their full size.
void run_mla_rank(const MlaJob& job, const MlaOptions& options, const MlaTensors& tensors, Transport& transport,
                  JobResult& result, const MlaShape& shape = {});

// A world of `world` threads (self for 1).
JobResult run_mla_job(const MlaJob& job, const MlaOptions& options, const MlaTensors& tensors, int world,
                      const MlaShape& shape = {}, const ThreadsDelivery& delivery = {});

// On this host's GPUs: a single rank for a world of 1, otherwise `world` ranks of this process, which share GPUs if
// there are too few.
JobResult run_gpu_mla_job(const MlaJob& job, const MlaOptions& options, const MlaTensors& tensors, int world,
                          const MlaShape& shape = {});

}  // namespace ringattn::testing
