// SPDX-License-Identifier: Apache-2.0
#include "launch/open_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "launch/input_warnings.hpp"
#include "launch/job_request.hpp"
#include "launch/plan_table.hpp"
#include "launch/ssm_request.hpp"
#include "ops/common/attention_op_job.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/input_agreement.hpp"
#include "ops/decode/decode_or_attend.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

std::unique_ptr<OpJob> open_job(const Config& config, Transport& world, const Collective& collective,
                                bool whole_result) {
  const JobOptions& options = config.options;
  std::optional<SsmInput> ssm;
  std::optional<JobInput> input;
  collective.run_collectively([&] {
    if (holds_ssm(config, true)) {
      ssm.emplace(open_ssm(config));
      if (whole_result) *ssm = ssm->with_final_states();
      return;
    }
    input.emplace(open_input(config, true, top_k_device(config, world)));
    if (collective.rank() == 0) warn_of_unseen_keys(config, *input);
  });
  if (ssm) {
    agree_on_files(collective, [&] { return ssm->fingerprints(); });
    return std::make_unique<SsmOpJob>(std::move(*ssm), !options.trace.empty());
  }
  agree_on_input(collective, *input);
  if (config.given("input") || input->makes_cache()) {
    const KernelRequest request = compatible_request({options.backend, options.kernel}, world);
    *input = decode_or_attend(std::move(*input), request, collective);
  }
  return std::make_unique<AttentionOpJob>(std::move(*input));
}

namespace {

// Jobs over latents in rows are decode steps only if all lengths are, because one table can't show both.
std::vector<JobInput> planned_inputs(const Config& config) {
  const KernelRequest request{config.options.backend, config.options.kernel};
  const auto settled = [&](JobInput input) {
    return decode_or_attend(std::move(input), request, planned_scope(config.options));
  };
  if (config.given("input")) return {settled(open_input(config, true))};
  std::vector<JobInput> inputs;
  for (const std::int64_t seq : config.options.seq) {
    JobInput input =
        decode_or_requested_rows({synthetic_input(config, seq), numerics_of(config), {}, config.share}, config);
    inputs.push_back(input.makes_cache() ? settled(std::move(input)) : std::move(input));
  }
  if (!std::ranges::all_of(inputs, &JobInput::decodes)) {
    for (JobInput& input : inputs) {
      if (input.makes_cache()) input = input.attended("another length makes no decode step");
    }
  }
  return inputs;
}

}  // namespace

std::unique_ptr<OpJob> open_measured_job(const Config& config, Transport& world, const Collective& collective) {
  const JobOptions& options = config.options;
  std::optional<SsmInput> ssm;
  std::optional<JobInput> input;
  collective.run_collectively([&] {
    const bool file = config.given("input");
    const TopKDevice target = top_k_device(config, world);
    if (holds_ssm(config, false)) {
      ssm.emplace(open_ssm(config));
      return;
    }
    if (file) {
      input.emplace(open_input(config, true, target));
    } else {
      input.emplace(decode_or_requested_rows(
          {synthetic_input(config, options.seq.front()), numerics_of(config), target, config.share}, config));
    }
    const bool ring = options.against == "compute" || options.against == "sgemm";
    if (ring && input->makes_cache()) {
      *input = input->attended(fmt::format("a decode step takes no --against {}", options.against));
    }
    if (collective.rank() == 0) warn_of_unseen_keys(config, *input);
  });
  if (ssm) {
    agree_on_files(collective, [&] { return ssm->fingerprints(); });
    return std::make_unique<SsmOpJob>(std::move(*ssm));
  }
  agree_on_files(collective, [&] { return input->fingerprints(); });
  const bool named = !config.given("input") && config.given("op");
  if (input->decodes() && (!named || input->makes_cache())) {
    *input =
        decode_or_attend(std::move(*input), compatible_request({options.backend, options.kernel}, world), collective);
  }
  return std::make_unique<AttentionOpJob>(std::move(*input));
}

std::vector<std::unique_ptr<OpJob>> open_planned_jobs(const Config& config) {
  std::vector<std::unique_ptr<OpJob>> jobs;
  if (holds_ssm(config, false)) {
    const bool file = config.given("input");
    for (const std::int64_t seq : config.options.seq) {
      jobs.push_back(std::make_unique<SsmOpJob>(open_ssm(config, seq)));
      if (file) break;
    }
    return jobs;
  }
  std::vector<JobInput> inputs = planned_inputs(config);
  warn_of_unseen_keys(config, inputs.front());
  for (JobInput& input : inputs) jobs.push_back(std::make_unique<AttentionOpJob>(std::move(input)));
  return jobs;
}

InputShape input_shape(const Config& config) {
  if (holds_ssm(config, true)) return SsmOpJob(open_ssm(config)).shape();
  return AttentionOpJob(open_input(config, true)).shape();
}

}  // namespace ringattn
