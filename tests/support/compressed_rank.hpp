// SPDX-License-Identifier: Apache-2.0
// A rank's side of an Attention over compressed keys and values, in the memory of the kernel.
#pragma once

#include <cstdint>

#include "ops/attention/compressed_blocks.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

// A job's tensors: the original ones, the compressed ones, and the decompressed ones.
struct CompressedJobTensors {
  JobTensors plain;  // k and v as they come back
  CompressedTensor k, v;
};

// Random tensors for the job, in its formats.
CompressedJobTensors compressed_job_tensors(const Job& job, std::uint64_t seed);

// One rank's part: shards the tensors, runs, and puts its rows into `result`, whose arrays have their full size.
// Streams have `gap` bytes after each row. In a job with pages, the pages are shuffled, and head-major if they have 64
// tokens. Collective.
void run_compressed_rank(const Job& job, const Options& options, const CompressedJobTensors& tensors,
                         Transport& transport, JobResult& result, std::int64_t gap = 0);

}  // namespace ringattn::testing
