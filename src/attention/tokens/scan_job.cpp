// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/scan_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

std::int64_t ScanJob::tokens() const { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }

std::string describe(const ScanJob& job) {
  const std::string convolution =
      job.convolution ? fmt::format(", behind a convolution of width {}{}{}", job.convolution->width,
                                    job.convolution->bias ? ", its bias" : "", job.convolution->silu ? " and silu" : "")
                      : "";
  return fmt::format("{}{}{}; {}, {} tokens{}{}{}", job.update ? "update of one token, " : "", describe(job.spec),
                     convolution, counted(job.lengths.size(), "sequence"), job.tokens(),
                     job.initial_states ? ", initial states" : "", job.initial_halos ? ", tokens in front" : "",
                     job.final_states ? ", final states" : "");
}

int convolution_channels(const ScanSpec& spec) {
  return spec.state_decays ? spec.heads : spec.heads * spec.head_dim + 2 * spec.groups * spec.state_dim;
}

void check_scan_job(const ScanJob& job) {
  check_scan(job.spec);
  const auto refuse = [](const std::string& what, const std::string& why) {
    fail(ErrorCode::kUsage, what, why, "Check the job.");
  };
  if (job.update && std::ranges::any_of(job.lengths, [](std::int64_t length) { return length != 1; })) {
    refuse("an update of sequences with several tokens", "it takes one token of each");
  }
  if (job.update && !(job.initial_states && job.final_states)) {
    refuse("an update without states", "it goes from a state of each sequence to the next");
  }
  if (!job.convolution) {
    if (job.initial_halos || job.final_halos) {
      refuse("tokens in front of a convolution", "the scan has no convolution");
    }
    return;
  }
  check_convolution(*job.convolution);
  if (job.convolution->channels != convolution_channels(job.spec) || job.convolution->dtype != job.spec.dtype) {
    refuse(fmt::format("a convolution of {} channels of {}", job.convolution->channels,
                       dtype_name(job.convolution->dtype)),
           fmt::format("in front of the scan there are {} of {}", convolution_channels(job.spec),
                       dtype_name(job.spec.dtype)));
  }
}

std::int64_t state_bytes(const ScanSpec& spec) {
  return std::int64_t{spec.heads} * spec.head_dim * spec.state_dim * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace ringattn
