// SPDX-License-Identifier: Apache-2.0
#include "launch/input_warnings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "launch/screen.hpp"

namespace ringattn {

namespace {

std::string_view axes_text(AxisOrder order) {
  switch (order) {
    case AxisOrder::kThd:
      return "[tokens, heads, head_dim]";
    case AxisOrder::kHtd:
      return "[heads, tokens, head_dim]";
    case AxisOrder::kBthd:
      return "[batch, tokens, heads, head_dim]";
    case AxisOrder::kBhtd:
      break;
  }
  return "[batch, heads, tokens, head_dim]";
}

// The order with tokens and heads exchanged.
AxisOrder exchanged(AxisOrder order) {
  switch (order) {
    case AxisOrder::kThd:
      return AxisOrder::kHtd;
    case AxisOrder::kHtd:
      return AxisOrder::kThd;
    case AxisOrder::kBthd:
      return AxisOrder::kBhtd;
    case AxisOrder::kBhtd:
      break;
  }
  return AxisOrder::kBthd;
}

// Queries before the first key. Those of a sequence whose q_offset was given elsewhere stand where they were meant to.
std::int64_t queries_without_key(const Job& job) {
  const std::int64_t right = job.spec.mask.right;
  if (right < 0) return 0;
  std::int64_t unseen = 0;
  for (const Sequence& sequence : job.batch.sequences) {
    if (sequence.q_offset != sequence.k_len - sequence.q_len) continue;
    unseen += std::clamp<std::int64_t>(sequence.q_len - sequence.k_len - right, 0, sequence.q_len);
  }
  return unseen;
}

}  // namespace

void note_assumed_model(const Config& config) {
  const JobOptions& options = config.options;
  if (options.model_assumed.empty()) return;
  print_note_line(
      fmt::format("model config: {} has no model_type: read {}", options.model_config, options.model_assumed));
}

void warn_of_unseen_keys(const Config& config, const JobInput& input) {
  if (!config.given("input") || config.given("query-offset")) return;
  const std::int64_t unseen = queries_without_key(input.job());
  if (unseen == 0) return;
  const AxisOrder order = input.out_grid().order;  // q's
  const AxisOrder other = exchanged(order);
  const bool heads_first = other == AxisOrder::kHtd || other == AxisOrder::kBhtd;
  print_warning_line(
      fmt::format("{} of {} queries see no key (q is {} by --order {}). Say --order {} if {} come first; "
                  "--mask full or --query-offset let queries see other keys.",
                  unseen, input.job().batch.q_tokens(), axes_text(order), axis_order_name(order),
                  axis_order_name(other), heads_first ? "heads" : "tokens"),
      config.options.color);
}

}  // namespace ringattn
