// SPDX-License-Identifier: Apache-2.0
#include "launch/bench_op.hpp"

#include <fmt/format.h>

#include "kernels/decode/decode.hpp"
#include "launch/op_flags.hpp"
#include "ops/common/attention_op_job.hpp"

namespace ringattn {

namespace {

bool has_decode_rows(const Config& config) {
  const auto& q_len = config.options.q_len;
  return !config.given("input") && q_len && *q_len >= 1 && *q_len <= kMaxDecodeRows;
}

}  // namespace

void fill_bench_op(Config& config) {
  const JobOptions& options = config.options;
  if (!has_decode_rows(config) || config.given("op") || options.op != Op::kAttention) return;
  if (options.against == "compute" || options.against == "sgemm") return;
  if (first_unknown(config, Op::kDecode) != nullptr) return;
  fill_value(config, "op", std::string(op_name(Op::kDecode)), Source::kDefault, "op");
}

void print_bench_op(const Screen& screen, const Config& config, const OpJob& job) {
  const auto* const attention = dynamic_cast<const AttentionOpJob*>(&job);
  if (attention == nullptr || !has_decode_rows(config)) return;
  const JobInput& input = attention->input();
  if (config.options.op == Op::kDecode) {
    if (config.given("op")) return;
    screen.context(
        fmt::format("op: decode, as --q-len {} makes steps; --op attention measures such rows around the ring",
                    *config.options.q_len));
  } else if (input.makes_cache()) {
    screen.context(fmt::format(
        "op: mla, a decode step, as --q-len {} makes one; --layout striped measures such rows around the ring",
        *config.options.q_len));
  } else if (!input.decodes() && input.not_decoded_reason().empty()) {
    screen.context(fmt::format("op: {}, rows around the ring; {} measures decode steps", op_name(input.op()),
                               input.op() == Op::kMla ? "--form absorbed" : "--op decode"));
  }
}

}  // namespace ringattn
