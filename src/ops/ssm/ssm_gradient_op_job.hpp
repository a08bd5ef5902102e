// SPDX-License-Identifier: Apache-2.0
// What the jobs of gradients of SSM layers share: ranks that own whole super-segments, a table of gradients for writing
// and checking output files, and shapes whose results are compared by digests.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "io/safetensors_file.hpp"
#include "ops/common/difference.hpp"
#include "ops/common/output_tensor.hpp"
#include "ops/jobs/gradient_op_job.hpp"
#include "ops/ssm/ssm_shapes.hpp"

namespace ringattn {

// Input: its forward() is a SsmInput. Loaded: a rank's rows, Loaded(Input, Backward, Collective, ProgressCallback),
// whose run() gives SsmStats, and fetch() the Result.
template <class Input, class Backward, class Result, class Loaded>
class SsmGradientOpJob : public GradientOpJob<Input, Backward, Result> {
 public:
  using GradientOpJob<Input, Backward, Result>::GradientOpJob;

  int threads() final { return this->backward_->options().threads; }
  std::vector<std::string> plan_lines(const PlanFigures& plan) final {
    return {fmt::format("ranks: {} of whole super-segments{}, {} planned for a rank",
                        counted(static_cast<std::uint64_t>(plan.blocks), "run"),
                        plan.bytes_moved > 0 ? "; " + sent_text(plan.bytes_moved) : "",
                        format_bytes(static_cast<double>(plan.memory_per_rank)))};
  }
  std::vector<std::string> plan_details() final { return {}; }
  RankFigures run(const ProgressCallback& on_progress = {}) final {
    const Collective collective(*this->world_, Timeouts(this->backward_->options().timeout_seconds));
    Loaded loaded(this->input_, *this->backward_, collective, on_progress);
    this->result_ = loaded.fetch(loaded.run());
    RankFigures mine = figures(this->result_->stats, this->result_->tokens());
    mine.non_finite.q = this->result_->non_finite;
    return mine;
  }
  Measured measure(const MeasureRequest& request, const Collective& collective) final {
    Loaded loaded(this->input_, *this->backward_, collective, request.on_progress);
    SsmStats last;
    const Samples samples = sample_ssm(
        collective, {request.samples, request.on_progress}, [&] { return loaded.run(); }, last);
    const Result result = loaded.fetch(last);
    const double bytes = token_bytes() * static_cast<double>(this->input_.forward().job().tokens());
    return {{{false, samples, bytes}},
            figures(last, result.tokens()),
            digest_gradients(this->input_, result, collective).front().hex};
  }
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

  // Results are compared by the digests of all gradients, which rank 0 of each shape has.
  void run_variants(Transport& world, const VariantDone& done) final {
    const Collective all(world, Timeouts(timeout_seconds_));
    std::string first;
    for (const SsmShape& shape : shapes_) {
      const std::unique_ptr<Transport> part = world.split_world(shape.ranks, all.timeouts().for_peer());
      std::string mine;
      std::optional<Error> agreed;  // agreed by the shape's ranks; the others don't know it yet
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
  // "3 states and their gradients, 1.5 MiB sent"
  virtual std::string sent_text(std::int64_t bytes) const = 0;
  // `tokens`: those of this rank.
  virtual RankFigures figures(const SsmStats& stats, std::int64_t tokens) const = 0;
  // Bytes read and written per token.
  virtual double token_bytes() const = 0;
  // All gradients of an output file, with that of the rows first.
  virtual std::vector<OutputTensor> gradients() const = 0;
  // A description of the first difference of the result from the earlier one; empty if there is none. Collective.
  virtual std::string first_difference(const Collective& collective) = 0;
  // Stores what run_shape() needs of the prepared op and the options. Returns the estimated seconds on one rank.
  virtual double keep_for_shapes(const Options& options) = 0;
  // The digests of all gradients, computed in a world of the shape. Collective.
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
