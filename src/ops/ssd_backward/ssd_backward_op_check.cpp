// SPDX-License-Identifier: Apache-2.0
// The checks of SSD's gradients: the fp64 oracle, an earlier result, and other worlds.
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

// The first head in which two gradients of a parameter differ, in words; empty: they are equal.
std::string parameter_difference(std::string_view name, const std::vector<float>& left,
                                 const std::vector<float>& right) {
  for (std::size_t head = 0; head < left.size(); ++head) {
    if (std::bit_cast<std::uint32_t>(left[head]) == std::bit_cast<std::uint32_t>(right[head])) continue;
    return fmt::format("{} at head {}: {} against {}", name, head, left[head], right[head]);
  }
  return {};
}

std::string digests_line(const std::vector<ResultDigest>& digests) {
  std::string line;
  for (const ResultDigest& digest : digests) line += digest.hex + "\n";
  return line;
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

void SsdBackwardOpJob::open_earlier(const std::string& path) {
  earlier_ = std::make_unique<const SafetensorsFile>(path);
  earlier_path_ = path;
  for (const SsdGradientRows& tensor : gradient_rows(spec())) {
    std::vector<std::int64_t> shape = input_.grid(tensor.heads, tensor.dim).shape();
    if (tensor.name == "ddt") shape.pop_back();
    check_output_tensor(path, output_tensor(*earlier_, path, std::string(tensor.name)), shape,
                        file_dtype(input_.job().gradients));
  }
  const std::int64_t heads = spec().heads;
  for (const SsdGradientParameter& parameter : gradient_parameters(spec())) {
    check_output_tensor(path, output_tensor(*earlier_, path, std::string(parameter.name)), {&heads, 1},
                        FileDtype::kF32);
  }
  if (input_.job().forward.initial_states) {
    check_output_tensor(path, output_tensor(*earlier_, path, "dinitial_states"), input_.forward().states_shape(),
                        FileDtype::kF32);
  }
}

std::vector<FileFingerprint> SsdBackwardOpJob::earlier_fingerprints() const {
  const TensorSource used[] = {earlier_->tensor("dx")};
  return ringattn::fingerprints(used);
}

Check SsdBackwardOpJob::check_earlier(const Collective& collective) {
  const SsdBackwardJob& job = input_.job();
  std::vector<std::int64_t> cu{0};
  for (const std::int64_t length : job.forward.lengths) cu.push_back(cu.back() + length);
  const auto check_rows = [&](std::string_view name, const RowGrid& grid, const TensorView& view,
                              std::span<const PackedRun> runs) {
    std::optional<Difference> mine;
    collective.run_collectively(
        [&] { mine = difference_from_file(earlier_->tensor(std::string(name)), grid, false, view, runs); });
    const auto difference = earliest(collective, mine);
    return difference ? ringattn::describe(*difference, cu, name) : std::string();
  };
  std::string difference;
  const std::vector<SsdGradientRows> tensors = gradient_rows(spec());
  for (std::size_t i = 0; i < tensors.size() && difference.empty(); ++i) {
    difference = check_rows(tensors[i].name, input_.grid(tensors[i].heads, tensors[i].dim), result_->rows_view(job, i),
                            result_->runs);
  }
  for (const SsdGradientParameter& parameter : gradient_parameters(spec())) {
    if (!difference.empty()) break;
    collective.run_collectively([&] {
      difference = parameter_difference(parameter.name, result_->parameters.*parameter.values,
                                        read_floats(earlier_->tensor(std::string(parameter.name))));
    });
  }
  if (difference.empty() && job.forward.initial_states) {
    const std::int64_t dim = std::int64_t{spec().head_dim} * spec().state_dim;
    std::optional<Difference> mine;
    collective.run_collectively([&] {
      mine = difference_from_file(earlier_->tensor("dinitial_states"),
                                  {AxisOrder::kThd, 1, std::ssize(job.forward.lengths), spec().heads, dim}, true,
                                  result_->initial_view(job), result_->sequences);
    });
    if (const auto found = earliest(collective, mine)) {
      difference =
          fmt::format("dinitial_states at sequence {}, head {}, element {}", found->token, found->head, found->dim);
    }
  }
  Check check;
  check.passes = difference.empty();
  if (!difference.empty()) check.lines.push_back(fmt::format("first difference: {}", difference));
  return check;
}

VariantTable SsdBackwardOpJob::list_variants(const VariantRequest& request, const Options& options) {
  shapes_ = ssm_shapes(request.ranks, input_.forward());
  std::erase_if(shapes_, [](const SsmShape& shape) { return shape.resumed; });
  shape_options_ = ssm_options(options);
  shape_seconds_ = backward_->estimated_seconds() * backward_->layout().world();
  release();
  return {{{"ranks", "", ""}, {"runs", "", ""}}, std::ssize(shapes_), {}};
}

// Results are compared by the digests of all gradients, which the first rank of each shape has.
void SsdBackwardOpJob::run_variants(Transport& world, const VariantDone& done) {
  const Collective all(world, Timeouts(shape_options_.timeout_seconds));
  std::string first;
  for (const SsmShape& shape : shapes_) {
    const std::unique_ptr<Transport> part = world.split_world(shape.ranks, all.timeouts().for_peer());
    std::string mine;
    std::optional<Error> agreed;  // by the shape's ranks; the others don't know yet
    if (part) {
      try {
        SsmOptions options = shape_options_;
        if (shape.in_turn) options.runs = runs_in_turn(input_.job().forward.lengths, shape.ranks);
        SsdBackward backward(input_.job(), *part, options);
        const Collective own(*part, all.timeouts());
        LoadedSsdBackward loaded(input_, backward, own);
        mine = digests_line(digest_gradients(input_, loaded.fetch(loaded.run()), own));
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
