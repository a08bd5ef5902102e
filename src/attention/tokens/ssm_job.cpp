// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/ssm_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

std::int64_t SsmJob::tokens() const { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }

std::string describe(const SsmJob& job) {
  const std::string convolution =
      job.convolution && !job.conv1d_only
          ? fmt::format(", after a convolution of width {}{}{}", job.convolution->width,
                        job.convolution->bias ? ", its bias" : "", job.convolution->silu ? " and silu" : "")
          : "";
  const std::string rope = job.rope ? fmt::format(", RoPE of {} dims{}{}", job.rope->rotary_dim,
                                                  job.rope->pairs == RopePairs::kInterleaved ? ", interleaved" : "",
                                                  job.rope->exact ? ", exact angles" : "")
                                    : "";
  return fmt::format("{}{}{}{}; {}, {} tokens{}{}{}{}", job.update ? "update of one token, " : "",
                     job.conv1d_only ? describe(*job.convolution) : describe(job.spec), convolution, rope,
                     counted(job.lengths.size(), "sequence"), job.tokens(),
                     job.initial_states ? ", initial states" : "", job.initial_halos ? ", initial halos" : "",
                     job.final_states ? ", final states" : "",
                     job.conv1d_only && job.final_halos ? ", final halos" : "");
}

std::string exact_settings(const SsmJob& job) {
  const SsmSpec& spec = job.spec;
  if (spec.decay == SsmDecay::kDt) return fmt::format("dt {:a} {:a}", spec.dt_min, spec.dt_max);
  std::string text = fmt::format("scale {:a}", spec.scale);
  if (!job.rope) return text;
  text += fmt::format("; {}, factor {:a}", describe(*job.rope), job.rope->attention_factor);
  for (const double frequency : job.rope->frequencies) text += fmt::format(" {:a}", frequency);
  return text;
}

int conv1d_channels(const SsmSpec& spec) {
  return spec.state_decays ? spec.heads : spec.heads * spec.head_dim + 2 * spec.groups * spec.state_dim;
}

std::string_view op_noun(const SsmJob& job) {
  if (job.conv1d_only) return "a causal conv1d";
  return job.spec.decay == SsmDecay::kDt ? "an SSM" : "linear attention";
}

void check_ssm_job(const SsmJob& job) {
  check_ssm(job.spec);
  const auto refuse = [](const std::string& what, const std::string& why) {
    fail(ErrorCode::kUsage, what, why, "Check the job.");
  };
  if (job.update && std::ranges::any_of(job.lengths, [](std::int64_t length) { return length != 1; })) {
    refuse("an update of sequences with several tokens", "it takes one token of each");
  }
  if (job.update && !(job.initial_states && job.final_states)) {
    refuse("an update without states", "it goes from a state of each sequence to the next");
  }
  if (job.rope) {
    check_rope(*job.rope);
    if (job.spec.decay == SsmDecay::kDt || job.convolution) refuse("RoPE in an SSM", "linear attention has it");
    if (job.rope->dtype != job.spec.dtype || job.rope->head_dim != job.spec.state_dim || job.rope->axis_count() != 1) {
      refuse(fmt::format("RoPE of {}", describe(*job.rope)),
             fmt::format("q and k are {} in heads of {}, with one position a token", dtype_name(job.spec.dtype),
                         job.spec.state_dim));
    }
  }
  if (job.convolution && job.spec.decay != SsmDecay::kDt) refuse("linear attention with a convolution", "SSMs have it");
  if (!job.convolution) {
    if (job.initial_halos || job.final_halos || job.conv1d_only) {
      refuse(job.conv1d_only ? "a convolution without an SSM" : "halos of a convolution", "the job has no convolution");
    }
    return;
  }
  check_causal_conv1d(*job.convolution);
  if (job.conv1d_only && (!job.spec.state_decays || job.initial_states || job.final_states)) {
    refuse("a convolution without an SSM, but with heads or states", "it has channels and halos");
  }
  if (job.convolution->channels != conv1d_channels(job.spec) || job.convolution->dtype != job.spec.dtype) {
    refuse(fmt::format("a convolution of {} channels of {}", job.convolution->channels,
                       dtype_name(job.convolution->dtype)),
           fmt::format("the SSM needs {} of {}", conv1d_channels(job.spec), dtype_name(job.spec.dtype)));
  }
}

std::int64_t state_bytes(const SsmSpec& spec) {
  return std::int64_t{spec.heads} * spec.head_dim * spec.state_dim * static_cast<std::int64_t>(sizeof(float));
}

std::int64_t carried_bytes(const SsmJob& job) {
  return job.conv1d_only ? job.convolution->halo_bytes() : state_bytes(job.spec);
}

std::string_view carried_name(const SsmJob& job) { return job.conv1d_only ? "final_conv_state" : "final_states"; }

std::string_view rows_name(const SsmSpec& spec) { return spec.decay == SsmDecay::kDt ? "y" : "out"; }

TensorView carried_view(const SsmJob& job, const void* data, std::int64_t sequences) {
  const SsmSpec& spec = job.spec;
  if (job.conv1d_only) return dense_view(data, spec.dtype, sequences, spec.heads, job.convolution->halo_tokens());
  return dense_view(data, Dtype::kF32, sequences, spec.heads, std::int64_t{spec.head_dim} * spec.state_dim);
}

}  // namespace ringattn
