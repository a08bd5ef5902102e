// SPDX-License-Identifier: Apache-2.0
// The checks of the convolution's gradients: against the fp64 oracle, against an earlier result, and in other worlds.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "base/size.hpp"
#include "comm/collective.hpp"
#include "ops/common/difference.hpp"
#include "ops/common/output_tensor.hpp"
#include "ops/conv1d_backward/conv1d_backward_accuracy.hpp"
#include "ops/conv1d_backward/conv1d_backward_op_job.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

Check Conv1dBackwardOpJob::check_oracle(const Collective& collective, std::int64_t) {
  const Conv1dBackwardAccuracy all = check_conv1d_gradients(collective, input_, *result_, threads());
  Check check;
  check.passes = pass(all.gradients);
  check.rows = all.rows;
  check.write = [all](JsonWriter& json) { write_accuracy(json, all.rows, all.gradients); };
  check.context.push_back(fmt::format("{} of dx against the fp64 oracle, {} of {} channels",
                                      counted(static_cast<std::uint64_t>(all.rows), "element"), all.channels,
                                      spec().channels));
  check.lines = accuracy_lines(all.gradients);
  return check;
}

std::string Conv1dBackwardOpJob::first_difference(const Collective& collective) {
  if (const auto found =
          rows_difference(collective, "dx", input_.forward().y_grid(), result_->dx_view(spec()), result_->runs)) {
    return ringattn::describe(*found, sequence_bounds(input_.job().lengths), "dx");
  }
  // Equal on all ranks: [channels, 1, dim].
  const auto weights_difference = [&](const char* name, const std::vector<float>& values,
                                      std::int64_t dim) -> std::string {
    if (values.empty()) return {};
    const PackedRun all[] = {{0, spec().channels}};
    const TensorView view = dense_view(static_cast<const void*>(values.data()), Dtype::kF32, spec().channels, 1, dim);
    const auto found = rows_difference(collective, name, {AxisOrder::kThd, 1, spec().channels, 1, dim}, view, all);
    return found ? fmt::format("{} at channel {}, tap {}", name, found->token, found->dim) : std::string();
  };
  std::string difference = weights_difference("dweight", result_->dweight, spec().width);
  if (difference.empty()) difference = weights_difference("dbias", result_->dbias, 1);
  if (!difference.empty() || !input_.job().initial_halos) return difference;
  const auto found =
      rows_difference(collective, "dconv_state", halos_grid(), result_->dinitial_view(spec()), result_->sequences);
  if (!found) return {};
  return fmt::format("dconv_state at sequence {}, channel {}, token {}", found->token, found->head, found->dim);
}

double Conv1dBackwardOpJob::keep_for_shapes(const Options& options) {
  options_ = {options.kernel, {}, options.threads, options.timeout_seconds};
  return plan_->seconds * plan_->layout.world();
}

std::vector<ResultDigest> Conv1dBackwardOpJob::run_shape(const SsmShape& shape, Transport& part,
                                                         const Collective& own) {
  CausalConv1dOptions options = options_;
  if (shape.in_turn) options.runs = runs_in_turn(input_.job().lengths, shape.ranks);
  CausalConv1dBackward backward(input_.job(), part, options);
  LoadedConv1dBackward loaded(input_, backward, own);
  return digest_gradients(input_, loaded.fetch(loaded.run()), own);
}

}  // namespace ringattn
