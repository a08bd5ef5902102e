// SPDX-License-Identifier: Apache-2.0
// The origin of an AttentionOpJob: what the ranks agree on, what is reported to the user, and the model that it belongs
// to.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "ops/attention/attention_op_job.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/input_agreement.hpp"
#include "ops/decode/decode_or_attend.hpp"
#include "ops/jobs/model_comparison.hpp"

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

// The number of queries before the first key. The user chose the positions of sequences with a q_offset, so their
// queries don't count.
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

void AttentionOpJob::agree(Transport& world, const KernelRequest& kernel, const Collective& collective) {
  agree_on_files(collective, [&] { return input_.fingerprints(); });
  if (origin_.settles) input_ = decode_or_attend(std::move(input_), compatible_request(kernel, world), collective);
}

void AttentionOpJob::check_model(const ModelComparison& compare) const { compare.same_attention(input_.job().spec); }

std::vector<MessageTemplate> AttentionOpJob::warnings() const {
  if (!origin_.from_file || origin_.offset_given) return {};
  const std::int64_t unseen = queries_without_key(input_.job());
  if (unseen == 0) return {};
  const AxisOrder order = input_.out_grid().order;  // the order of q
  const AxisOrder other = exchanged(order);
  const bool heads_first = other == AxisOrder::kHtd || other == AxisOrder::kBhtd;
  return {
      {fmt::format("{} of {} queries see no key (q is {} by ", unseen, input_.job().batch.q_tokens(), axes_text(order)),
       setting("order", axis_order_name(order)), "). Say ", setting("order", axis_order_name(other)),
       fmt::format(" if {} come first; ", heads_first ? "heads" : "tokens"), setting("mask", "full"), " or ",
       setting("query_offset"), " let queries see other keys."}};
}

std::vector<MessageTemplate> AttentionOpJob::notes() const {
  if (origin_.measured_rows == 0) return {};
  if (!input_.decodes()) {
    if (!input_.not_decoded_reason().empty()) return {};
    return {{"op: attention, ring attention; ", setting("op", "decode"), " measures decode steps"}};
  }
  if (origin_.op_given) return {};
  return {{"op: decode, as ", setting("q_len", origin_.measured_rows), " makes steps; ", setting("op", "attention"),
           " measures them as ring attention"}};
}

}  // namespace ringattn
