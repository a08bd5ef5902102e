// SPDX-License-Identifier: Apache-2.0
// The checks of the convolution's gradients: the fp64 oracle, an earlier result, and other worlds.
#include <fmt/format.h>

#include <memory>
#include <utility>

#include "base/size.hpp"
#include "comm/collective.hpp"
#include "ops/common/difference.hpp"
#include "ops/common/output_tensor.hpp"
#include "ops/conv1d_backward/conv1d_backward_accuracy.hpp"
#include "ops/conv1d_backward/conv1d_backward_op_job.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

namespace {

std::string all_digests(const std::vector<ResultDigest>& digests) {
  std::string line;
  for (const ResultDigest& digest : digests) line += digest.hex + "\n";
  return line;
}

}  // namespace

Check Conv1dBackwardOpJob::check_oracle(const Collective& collective, std::int64_t) {
  const Conv1dBackwardAccuracy all = check_conv1d_gradients(collective, input_, *result_, options_.threads);
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

void Conv1dBackwardOpJob::open_earlier(const std::string& path) {
  earlier_ = std::make_unique<const SafetensorsFile>(path);
  const auto check_tensor = [&](const char* name, const std::vector<std::int64_t>& shape, FileDtype dtype) {
    check_output_tensor(path, output_tensor(*earlier_, path, name), shape, dtype);
  };
  check_tensor("dx", input_.forward().y_shape(), file_dtype(spec().dtype));
  check_tensor("dweight", {spec().channels, spec().width}, FileDtype::kF32);
  if (spec().bias) check_tensor("dbias", {spec().channels}, FileDtype::kF32);
  if (input_.job().initial_halos) {
    check_tensor("dconv_state", input_.forward().halos_shape(), file_dtype(spec().dtype));
  }
}

std::vector<FileFingerprint> Conv1dBackwardOpJob::earlier_fingerprints() const {
  const TensorSource used[] = {earlier_->tensor("dx")};
  return ringattn::fingerprints(used);
}

Check Conv1dBackwardOpJob::check_earlier(const Collective& collective) {
  const auto rows_differ = [&](const char* name, const RowGrid& grid, const TensorView& view,
                               std::span<const PackedRun> runs) {
    std::optional<Difference> mine;
    collective.run_collectively([&] { mine = difference_from_file(earlier_->tensor(name), grid, false, view, runs); });
    return earliest(collective, mine);
  };
  std::string difference;
  if (const auto found = rows_differ("dx", input_.forward().y_grid(), result_->dx_view(spec()), result_->runs)) {
    std::vector<std::int64_t> cu{0};
    for (const std::int64_t length : input_.job().lengths) cu.push_back(cu.back() + length);
    difference = ringattn::describe(*found, cu, "dx");
  }
  // The same on all ranks: [channels, 1, dim].
  const auto check_weights = [&](const char* name, const std::vector<float>& values, std::int64_t dim) {
    if (!difference.empty() || values.empty()) return;
    const PackedRun all[] = {{0, spec().channels}};
    const TensorView view = dense_view(static_cast<const void*>(values.data()), Dtype::kF32, spec().channels, 1, dim);
    if (const auto found = rows_differ(name, {AxisOrder::kThd, 1, spec().channels, 1, dim}, view, all)) {
      difference = fmt::format("{} at channel {}, tap {}", name, found->token, found->dim);
    }
  };
  check_weights("dweight", result_->dweight, spec().width);
  check_weights("dbias", result_->dbias, 1);
  if (difference.empty() && input_.job().initial_halos) {
    if (const auto found =
            rows_differ("dconv_state", halos_grid(), result_->dinitial_view(spec()), result_->sequences)) {
      difference =
          fmt::format("dconv_state at sequence {}, channel {}, token {}", found->token, found->head, found->dim);
    }
  }
  Check check;
  check.passes = difference.empty();
  if (!difference.empty()) check.lines.push_back(fmt::format("first difference: {}", difference));
  return check;
}

VariantTable Conv1dBackwardOpJob::list_variants(const VariantRequest& request, const Options& options) {
  shapes_ = ssm_shapes(request.ranks, input_.forward());
  std::erase_if(shapes_, [](const SsmShape& shape) { return shape.resumed; });
  options_ = {options.kernel, {}, options.threads, options.timeout_seconds};
  shape_seconds_ = plan_->seconds * plan_->layout.world();
  release();
  return {{{"ranks", "", ""}, {"runs", "", ""}}, std::ssize(shapes_), {}};
}

// Results are compared by the digests of all gradients, which the first rank of each shape has.
void Conv1dBackwardOpJob::run_variants(Transport& world, const VariantDone& done) {
  const Collective all(world, Timeouts(options_.timeout_seconds));
  std::string first;
  for (const SsmShape& shape : shapes_) {
    const std::unique_ptr<Transport> part = world.split_world(shape.ranks, all.timeouts().for_peer());
    std::string mine;
    std::optional<Error> agreed;  // by the shape's ranks; the others don't know yet
    if (part) {
      try {
        CausalConv1dOptions options = options_;
        if (shape.in_turn) options.runs = runs_in_turn(input_.job().lengths, shape.ranks);
        CausalConv1dBackward backward(input_.job(), *part, options);
        const Collective own(*part, all.timeouts());
        LoadedConv1dBackward loaded(input_, backward, own, std::max(1, options.threads));
        mine = all_digests(digest_gradients(input_, loaded.fetch(loaded.run()), own));
      } catch (const AgreedError& error) {
        agreed = error;
      }
    }
    ringattn::agree(world, agreed ? &*agreed : nullptr, all.timeouts().for_work(shape_seconds_));
    const std::string digests = all.gather(mine).front();
    if (first.empty()) first = digests;
    done({fmt::format("{}", shape.ranks), shape.in_turn ? "in-turn" : "neighbours"},
         digests == first ? std::string() : fmt::format("digests {} against {}", digests, first));
  }
}

}  // namespace ringattn
