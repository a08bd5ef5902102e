// SPDX-License-Identifier: Apache-2.0
#include "launch/open_job.hpp"

#include <optional>
#include <utility>

#include "launch/input_warnings.hpp"
#include "launch/job_request.hpp"
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
    const OpenedSource source = open_source(config, true);
    if (source.ssm) {
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

InputShape input_shape(const Config& config) {
  if (open_source(config, true).ssm) return SsmOpJob(open_ssm(config)).shape();
  return AttentionOpJob(open_input(config, true)).shape();
}

}  // namespace ringattn
