// SPDX-License-Identifier: Apache-2.0
// Jobs over caches with evicted tokens, and their expected results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention/tokens/job.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

// A job over whole sequences, and the job after an eviction. Each head keeps different random tokens, and the last
// `recent` ones.
struct Evicted {
  Job whole;
  JobTensors all;
  Job job;  // over the kept tokens, before positions are set
  JobTensors tensors;
  std::shared_ptr<const KeyPositions> positions;

  Evicted(Job the_whole, double ratio, int heads, std::uint64_t seed, std::int64_t recent = 0);

  Job placed() const;

 private:
  std::vector<std::byte> compacted(std::vector<std::byte>& from, int dim, const std::vector<std::int32_t>& rows) const;
  std::int64_t job_keys() const;
};

// The result by definition: each row and K/V head is a separate job over that head's kept tokens in plain rows, of
// which the row sees the contiguous run that the mask allows. `run` computes such a job.
JobResult by_definition(const Evicted& evicted,
                        const std::function<JobResult(const Job& job, const JobTensors& tensors)>& run);

// The result in fp64 over the whole cache, of which a head's row sees the kept tokens that the mask allows.
void expect_right(const Evicted& evicted, const JobResult& result);

}  // namespace ringattn::testing
