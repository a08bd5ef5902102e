// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/gated_delta_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

std::int64_t GatedDeltaJob::tokens() const { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }

std::string describe(const GatedDeltaJob& job) {
  return fmt::format("{}{}; {}, {} tokens{}{}", job.update ? "update of one token, " : "", describe(job.spec),
                     counted(job.lengths.size(), "sequence"), job.tokens(),
                     job.initial_states ? ", initial states" : "", job.final_states ? ", final states" : "");
}

void check_gated_delta_job(const GatedDeltaJob& job) {
  check_gated_delta(job.spec);
  if (!job.update) return;
  if (std::ranges::any_of(job.lengths, [](std::int64_t length) { return length != 1; })) {
    fail(ErrorCode::kUsage, "an update of sequences with several tokens", "it takes one token of each",
         "Check the job.");
  }
  if (job.initial_states && job.final_states) return;
  fail(ErrorCode::kUsage, "an update without states", "it goes from a state of each sequence to the next",
       "Check the job.");
}

std::int64_t state_bytes(const GatedDeltaSpec& spec) {
  return state_floats(spec) * static_cast<std::int64_t>(sizeof(float));
}

double gated_delta_token_flops(const GatedDeltaSpec& spec) { return 6.0 * static_cast<double>(state_floats(spec)); }

std::int64_t gated_delta_token_bytes(const GatedDeltaSpec& spec) {
  const std::int64_t rows =
      2 * std::int64_t{spec.key_heads} * spec.key_dim + 2 * std::int64_t{spec.value_heads} * spec.value_dim;
  const std::int64_t gates = std::int64_t{spec.value_heads} * (spec.decay_dim() + 1);
  return rows * static_cast<std::int64_t>(size_of(spec.dtype)) + gates * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace ringattn
