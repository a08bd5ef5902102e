// SPDX-License-Identifier: Apache-2.0
// How much another cache changes O: fp64 of the same job over both, on sampled rows. For MLA, O is the result of the
// whole formula, after w_uv.
#pragma once

#include <cstdint>

#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

// Where O or LSE is no number, neither is what is said of their change.
struct OutputChange {
  std::int64_t rows = 0;
  double relative_error = 0.0;  // root mean square of the change, as a share of O's root mean square
  double greatest = 0.0;        // change of any element
  double greatest_lse = 0.0;    // change of any LSE, of rows that see a key of both
  std::int64_t emptied = 0;     // rows that see none any more: their O is 0
};

// `before` and `after`: the same job over both caches, the second of which may lack keys of the first; both have the
// same rows of q. `count` rows (sample_rows()); `threads` make and decompress input. Throws what JobInput::read()
// throws.
OutputChange output_change(const JobInput& before, const JobInput& after, std::int64_t count, int threads);

}  // namespace ringattn
