// SPDX-License-Identifier: Apache-2.0
// The checks of SSM ops.
#include <fmt/format.h>

#include <utility>

#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/common/difference.hpp"
#include "ops/ssm/ssm_accuracy.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

namespace {

std::string location(const RowSample& sample) { return fmt::format("token {}, head {}", sample.token, sample.head); }

void write_accuracy(JsonWriter& json, const SsmAccuracy& accuracy) {
  json.begin_object().member("rows", accuracy.rows).key("out");
  if (accuracy.compared == 0) {
    json.null();
  } else {
    json.begin_object().member("greatest_error", accuracy.error).member("allowed", accuracy.allowed);
    json.member("token", accuracy.worst.token).member("head", accuracy.worst.head).end_object();
  }
  const StateAccuracy& states = accuracy.states;
  json.key("lse").null().key("final_states");
  if (states.compared == 0) {
    json.null();
  } else {
    json.begin_object().member("greatest_error", states.error).member("allowed", states.allowed);
    json.member("sequence", states.sequence).member("head", states.head).end_object();
  }
  json.member("misplaced", accuracy.misplaced + states.misplaced).end_object();
}

}  // namespace

Check SsmOpJob::check_oracle(const Collective& collective, std::int64_t count) {
  const SsmAccuracy all = check_ssm_result(collective, input_, count, result().result_view(input_.job()),
                                           rounds_factors(kernel()), threads());
  Check check;
  check.passes = all.passes();
  check.rows = all.rows;
  check.write = [all](JsonWriter& json) { write_accuracy(json, all); };
  check.context.push_back(
      fmt::format("{} against the fp64 oracle", counted(static_cast<std::uint64_t>(all.rows), "row")));
  if (all.compared == 0) {
    check.lines.push_back(fmt::format("{}: no value is finite both here and in fp64", rows_name(input_.job().spec)));
  } else {
    check.lines.push_back(fmt::format("{}: greatest error {:.3g} of what is allowed, {:.3g} of {:.3g} at {}",
                                      rows_name(input_.job().spec), all.part, all.error, all.allowed,
                                      location(all.worst)));
  }
  if (all.misplaced > 0) {
    check.lines.push_back(fmt::format("{} values are NaN or infinite where fp64 has another value, the first at {}",
                                      all.misplaced, location(all.first_misplaced)));
  }
  const StateAccuracy& states = all.states;
  if (states.compared > 0) {
    check.lines.push_back(
        fmt::format("final states: greatest error {:.3g} of what is allowed, {:.3g} of {:.3g} at sequence {}, head {}",
                    states.part, states.error, states.allowed, states.sequence, states.head));
  }
  if (states.misplaced > 0) {
    check.lines.push_back(fmt::format("NaN or infinite in final states where fp64 has another value: {}",
                                      counted(static_cast<std::uint64_t>(states.misplaced), "element")));
  }
  return check;
}

Check SsmOpJob::check_earlier(const Collective& collective) {
  const SsmJob& job = input_.job();
  std::optional<Difference> mine;
  collective.run_collectively([&] {
    mine = earlier_->compare(result().runs, result().y_view(job.spec), result().sequences, result().carried_view(job));
  });
  const auto difference = earliest(collective, mine);
  Check check;
  check.passes = !difference;
  if (!earlier_->has_carried()) check.context.push_back(fmt::format("it holds no {}", carried_name(job)));
  if (difference) check.lines.push_back(fmt::format("first difference: {}", ringattn::describe(*difference, job)));
  return check;
}

VariantTable SsmOpJob::list_variants(const VariantRequest& request, const Options& options) {
  shapes_ = ssm_shapes(request.ranks, input_.job().lengths);
  shape_options_ = ssm_options(options);
  shape_seconds_ = prepared_->ssm().estimated_seconds() * prepared_->ssm().layout().world();
  prepared_.reset();
  VariantTable table;
  table.count = static_cast<std::int64_t>(shapes_.size());
  table.columns = {{"ranks", "", ""},
                   {"runs", "", ""},
                   {"sequences", "", ""},
                   {input_.job().conv1d_only ? "halos" : "states", "moved", ""}};
  if (!shapes_.back().resumed) {
    table.notes.push_back(fmt::format(
        "no sequence is longer than a super-segment of {} tokens, so none is cut and resumed", kSuperSegmentTokens));
  }
  return table;
}

void SsmOpJob::run_variants(Transport& world, const VariantDone& done) {
  run_ssm_shapes(input_, shape_options_, shapes_, world, shape_seconds_,
                 [&](const SsmShape& shape, const SsmShapeResult& result) {
                   done({fmt::format("{}", shape.ranks), shape.in_turn ? "in-turn" : "neighbours",
                         shape.resumed ? "resumed" : "whole", fmt::format("{}", result.states)},
                        result.difference ? ringattn::describe(*result.difference, input_.job()) : std::string());
                 });
}

}  // namespace ringattn
