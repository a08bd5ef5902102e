// SPDX-License-Identifier: Apache-2.0
// How much of a row's attention its block mask keeps: the softmax weight of the keys in the block mask, as a share of
// the weight of all keys that the mask lets through. Computed by the fp64 oracle on sampled rows. Sinks don't count.
#pragma once

#include <cstdint>

#include "comm/collective.hpp"
#include "ops/attention_jobs/accuracy.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

struct KeptMass {
  std::int64_t rows = 0;  // rows that see a key
  double mean = 1.0;      // over these rows
  double minimum = 1.0;
};

// Measures `count` sampled rows of the job (sample_rows()), divided among the ranks. Collective; all ranks get the same
// result. `threads` threads generate synthetic input.
KeptMass kept_mass(const Collective& collective, const JobInput& input, std::int64_t count, int threads);

}  // namespace ringattn
