// SPDX-License-Identifier: Apache-2.0
#include "launch/ssm_request.hpp"

#include <fmt/format.h>

#include "launch/check_model.hpp"
#include "launch/job_request.hpp"
#include "launch/op_flags.hpp"

namespace ringattn {

namespace {

// A decode step takes one token of each sequence. The earlier tokens are in its state, so their number is not given.
void check_update(const Config& config) {
  if (config.options.q_len != 1) {
    fail(ErrorCode::kUsage, fmt::format("{} is {}", config.origin("q-len"), *config.options.q_len),
         "a decode step takes one token of each sequence", "Use --q-len 1, or leave it out to process --seq tokens.");
  }
  if (chosen(config, "seq")) {
    fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin("seq"), config.origin("q-len")),
         "an SSM decode step continues from a state, whose size does not depend on the number of earlier tokens",
         "Leave one of them out.");
  }
}

SsmRequest ssm_request(const Config& config, std::int64_t seq) {
  const JobOptions& options = config.options;
  if (config.given("input")) return file_input(config);
  if (options.q_len) check_update(config);
  SyntheticSsmInput input;
  input.update = options.q_len.has_value();
  input.selective = options.op == Op::kSelectiveScan;
  input.convolution = options.op == Op::kConv1d;
  input.seed = options.synthetic;
  input.tokens = input.update ? 1 : seq;
  input.batch = options.batch;
  input.heads = options.heads;
  input.head_dim = options.head_dim;
  input.groups = options.groups;
  input.state_dim = options.state_dim;
  input.conv_width = options.conv_width;
  input.dtype = options.dtype;
  input.order = options.order;
  return input;
}

SsmNumerics ssm_numerics(const JobOptions& options) {
  return {options.dt_softplus, options.dt_min, options.dt_max, options.final_states, options.ranks.value_or(1)};
}

}  // namespace

bool holds_ssm(const Config& config, bool require_source) {
  check_source(config, require_source);
  if (!config.given("input")) return is_ssm(config.options.op);
  return open_input_file(file_input(config), *config.share)->ssm.has_value();
}

SsmInput open_ssm(const Config& config, std::int64_t seq) {
  SsmInput input(ssm_request(config, seq), ssm_numerics(config.options), config.share);
  check_op(config, input.op());
  check_model(config, input.job());
  return input;
}

SsmInput open_ssm(const Config& config) { return open_ssm(config, config.options.seq.front()); }

}  // namespace ringattn
