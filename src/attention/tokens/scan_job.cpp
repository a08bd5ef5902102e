// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/scan_job.hpp"

#include <fmt/format.h>

#include <numeric>

#include "base/size.hpp"

namespace ringattn {

std::int64_t ScanJob::tokens() const { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }

std::string describe(const ScanJob& job) {
  return fmt::format("{}; {}, {} tokens{}{}", describe(job.spec), counted(job.lengths.size(), "sequence"), job.tokens(),
                     job.initial_states ? ", initial states" : "", job.final_states ? ", final states" : "");
}

std::int64_t state_bytes(const ScanSpec& spec) {
  return std::int64_t{spec.heads} * spec.head_dim * spec.state_dim * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace ringattn
