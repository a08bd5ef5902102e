// SPDX-License-Identifier: Apache-2.0
// How much another cache changes O: computes sampled rows of the same job over both caches in fp64. For MLA, O is the
// result of the whole formula, after w_uv.
#pragma once

#include <cstdint>

#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

// If O or LSE is NaN, so are the members about its change.
struct OutputChange {
  std::int64_t rows = 0;
  double relative_error = 0.0;  // root mean square of the change, as a share of O's root mean square
  double greatest = 0.0;        // change of any element
  double greatest_lse = 0.0;    // change of any LSE of rows that see a key in both caches
  std::int64_t emptied = 0;     // rows that see no key any more: their O is 0
};

// `before` and `after`: the same job over both caches, with the same rows of q. The second cache may lack keys of the
// first. Compares `count` rows (sample_rows()). `threads` threads generate and decompress input. Throws the errors of
// JobInput::read().
OutputChange output_change(const JobInput& before, const JobInput& after, std::int64_t count, int threads);

}  // namespace ringattn
