// SPDX-License-Identifier: Apache-2.0
// Rows of an input for the fp64 oracle (kernels/attention/oracle.hpp): reads their queries, and feeds them keys and
// values.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/attention/oracle.hpp"
#include "kernels/attention/visibility.hpp"
#include "ops/attention_jobs/accuracy.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

// The sequence that a packed query token belongs to. `cu_q`: token at which each sequence begins, then the total.
std::size_t sequence_of(std::span<const std::int64_t> cu_q, std::int64_t token);

// The sampled query: [head_dim], including the rotary part for MLA, or the query in the latent space. Throws the errors
// of JobInput::read(), as the next function does.
std::vector<float> query_of(const JobInput& input, const RowSample& sample, int threads);

// Feeds these keys of a sequence to its rows, piece by piece. For MLA the rows are those of the absorbed form: keys are
// latents with their rotary keys, and values are latents.
void feed_keys(const JobInput& input, std::size_t sequence, const KeyRange& keys, std::span<OracleRow> rows,
               int threads);

}  // namespace ringattn
