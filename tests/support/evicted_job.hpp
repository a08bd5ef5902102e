// SPDX-License-Identifier: Apache-2.0
// Jobs over caches that have lost tokens, with what they must give.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention/tokens/job.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

// A job over whole sequences, and what is left of it. Each head keeps tokens of its own, drawn at random, and the last
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

// By definition: each row and K/V head is a job of its own, over that head's kept tokens in plain rows, of which the
// row sees the run that the mask lets through. `run` computes such a job.
JobResult by_definition(const Evicted& evicted,
                        const std::function<JobResult(const Job& job, const JobTensors& tensors)>& run);

// fp64 of the whole cache, of which a head's row sees the kept tokens that the mask lets through.
void expect_right(const Evicted& evicted, const JobResult& result);

}  // namespace ringattn::testing
