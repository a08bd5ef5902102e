// SPDX-License-Identifier: Apache-2.0
// The checks of SSD's gradients: against the fp64 oracle, against an earlier result, and in other worlds.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <utility>

#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "comm/collective.hpp"
#include "ops/common/difference.hpp"
#include "ops/common/output_tensor.hpp"
#include "ops/ssd_backward/ssd_backward_accuracy.hpp"
#include "ops/ssd_backward/ssd_backward_op_job.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

namespace {

// A description of the first head in which two gradients of a parameter differ; empty if they are equal.
std::string parameter_difference(std::string_view name, const std::vector<float>& left,
                                 const std::vector<float>& right) {
  for (std::size_t head = 0; head < left.size(); ++head) {
    if (std::bit_cast<std::uint32_t>(left[head]) == std::bit_cast<std::uint32_t>(right[head])) continue;
    return fmt::format("{} at head {}: {} against {}", name, head, left[head], right[head]);
  }
  return {};
}

}  // namespace

Check SsdBackwardOpJob::check_oracle(const Collective& collective, std::int64_t) {
  const SsdBackwardAccuracy all =
      check_ssd_gradients(collective, input_, *result_, kernel().backend != "cpu", threads());
  Check check;
  check.passes = all.passes();
  check.rows = all.rows;
  check.write = [all](JsonWriter& json) { write_accuracy(json, all.rows, all.gradients); };
  check.context.push_back(fmt::format("{} of dx against the fp64 oracle{}",
                                      counted(static_cast<std::uint64_t>(all.rows), "row"),
                                      all.all_heads ? "" : ", two heads of each token; dB and dC are not compared"));
  check.lines = accuracy_lines(all.gradients);
  return check;
}

std::string SsdBackwardOpJob::first_difference(const Collective& collective) {
  const SsdBackwardJob& job = input_.job();
  const std::vector<SsdGradientRows> tensors = gradient_rows(spec());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto found = rows_difference(collective, tensors[i].name, input_.grid(tensors[i].heads, tensors[i].dim),
                                       result_->rows_view(job, i), result_->runs);
    if (found) return ringattn::describe(*found, sequence_bounds(job.forward.lengths), tensors[i].name);
  }
  for (const SsdGradientParameter& parameter : gradient_parameters(spec())) {
    std::string difference;
    collective.run_collectively([&] {
      difference = parameter_difference(parameter.name, result_->parameters.*parameter.values,
                                        read_floats(earlier().tensor(std::string(parameter.name))));
    });
    if (!difference.empty()) return difference;
  }
  if (!job.forward.initial_states) return {};
  const auto found =
      rows_difference(collective, "dinitial_states", states_grid(), result_->initial_view(job), result_->sequences);
  if (!found) return {};
  return fmt::format("dinitial_states at sequence {}, head {}, element {}", found->token, found->head, found->dim);
}

double SsdBackwardOpJob::keep_for_shapes(const Options& options) {
  shape_options_ = ssm_options(options);
  return backward_->estimated_seconds() * backward_->layout().world();
}

std::vector<ResultDigest> SsdBackwardOpJob::run_shape(const SsmShape& shape, Transport& part, const Collective& own) {
  SsmOptions options = shape_options_;
  if (shape.in_turn) options.runs = runs_in_turn(input_.job().forward.lengths, shape.ranks);
  SsdBackward backward(input_.job(), part, options);
  LoadedSsdBackward loaded(input_, backward, own);
  return digest_gradients(input_, loaded.fetch(loaded.run()), own);
}

}  // namespace ringattn
