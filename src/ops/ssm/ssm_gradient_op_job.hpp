// SPDX-License-Identifier: Apache-2.0
// What the jobs of gradients of SSM layers have in common: ranks that own whole super-segments, a table of gradients by
// which output files are written and checked, and shapes whose results are compared by digests.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_writer.hpp"
#include "io/safetensors_file.hpp"
#include "ops/common/difference.hpp"
#include "ops/common/output_tensor.hpp"
#include "ops/jobs/gradient_op_job.hpp"
#include "ops/ssm/ssm_shapes.hpp"

namespace ringattn {

// Input: its forward() is a SsmInput.
template <class Input, class Backward, class Result>
class SsmGradientOpJob : public GradientOpJob<Input, Backward, Result> {
 public:
  using GradientOpJob<Input, Backward, Result>::GradientOpJob;

  std::vector<std::string> plan_details() final { return {}; }
  std::vector<std::string_view> lanes() const final { return {"compute"}; }
  std::vector<TraceEvent> timeline() const final { return {}; }
  void write_non_finite(JsonWriter& json, const NonFinite& total) const final {
    json.begin_object().member("rows", total.q).end_object();
  }

  void open_earlier(const std::string& path) final {
    earlier_ = std::make_unique<const SafetensorsFile>(path);
    for (const OutputTensor& tensor : gradients()) {
      check_output_tensor(path, output_tensor(*earlier_, path, tensor.name), tensor.shape, tensor.dtype);
    }
  }
  std::vector<FileFingerprint> earlier_fingerprints() const final {
    const TensorSource used[] = {earlier_->tensor(gradients().front().name)};
    return ringattn::fingerprints(used);
  }
  Check check_earlier(const Collective& collective) final { return this->earlier_check(first_difference(collective)); }

  VariantTable list_variants(const VariantRequest& request, const Options& options) final {
    shapes_ = ssm_shapes(request.ranks, this->input_.forward().job().lengths);
    std::erase_if(shapes_, [](const SsmShape& shape) { return shape.resumed; });
    timeout_seconds_ = options.timeout_seconds;
    shape_seconds_ = keep_for_shapes(options);
    this->release();
    return {{{"ranks", "", ""}, {"runs", "", ""}}, std::ssize(shapes_), {}};
  }

  // Results are compared by the digests of all gradients, which the first rank of each shape has.
  void run_variants(Transport& world, const VariantDone& done) final {
    const Collective all(world, Timeouts(timeout_seconds_));
    std::string first;
    for (const SsmShape& shape : shapes_) {
      const std::unique_ptr<Transport> part = world.split_world(shape.ranks, all.timeouts().for_peer());
      std::string mine;
      std::optional<Error> agreed;  // by the shape's ranks; the others don't know yet
      if (part) {
        try {
          for (const ResultDigest& digest : run_shape(shape, *part, Collective(*part, all.timeouts()))) {
            mine += digest.hex + "\n";
          }
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

 protected:
  // All gradients of an output file; first that of the rows.
  virtual std::vector<OutputTensor> gradients() const = 0;
  // The first difference of the result from the earlier one; empty: there is none. Collective.
  virtual std::string first_difference(const Collective& collective) = 0;
  // Keeps what run_shape() needs of the prepared op and the options. Returns the estimated seconds on one rank.
  virtual double keep_for_shapes(const Options& options) = 0;
  // The digests of all gradients on a world of the shape. Collective.
  virtual std::vector<ResultDigest> run_shape(const SsmShape& shape, Transport& part, const Collective& own) = 0;

  // The first difference of rows from a tensor of the earlier file. Collective.
  std::optional<Difference> rows_difference(const Collective& collective, std::string_view name, const RowGrid& grid,
                                            const TensorView& view, std::span<const PackedRun> runs) const {
    std::optional<Difference> mine;
    collective.run_collectively(
        [&] { mine = difference_from_file(earlier_->tensor(std::string(name)), grid, false, view, runs); });
    return earliest(collective, mine);
  }
  const SafetensorsFile& earlier() const { return *earlier_; }

 private:
  std::unique_ptr<const SafetensorsFile> earlier_;
  std::vector<SsmShape> shapes_;  // of run_variants()
  double timeout_seconds_ = 0.0;
  double shape_seconds_ = 0.0;  // estimated, on one rank
};

// Sequence boundaries by which a difference is described.
inline std::vector<std::int64_t> sequence_bounds(std::span<const std::int64_t> lengths) {
  std::vector<std::int64_t> cu{0};
  for (const std::int64_t length : lengths) cu.push_back(cu.back() + length);
  return cu;
}

}  // namespace ringattn
