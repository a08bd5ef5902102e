// SPDX-License-Identifier: Apache-2.0
// The gradients of the causal convolution as an OpJob.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors_file.hpp"
#include "ops/common/op_job.hpp"
#include "ops/conv1d_backward/conv1d_backward_input.hpp"
#include "ops/conv1d_backward/conv1d_backward_plan.hpp"
#include "ops/conv1d_backward/loaded_conv1d_backward.hpp"
#include "ops/ssm/ssm_shapes.hpp"

namespace ringattn {

std::unique_ptr<OpPlan> plan_conv1d_backward_worlds(const Conv1dBackwardInput& input, const PlanRequest& request);

class Conv1dBackwardOpJob final : public OpJob {
 public:
  explicit Conv1dBackwardOpJob(const OpRequest& request) : input_(request) {}

  std::string_view op() const override;
  std::string describe() const override;
  std::string describe_shape() const override { return "backward of " + ringattn::describe(spec()); }
  std::string source() const override { return input_.source(); }
  std::vector<FileFingerprint> fingerprints() const override { return input_.fingerprints(); }
  UnreadTensors unread() const override { return input_.unread(); }
  InputShape shape() const override;
  double flops() const override;
  std::int64_t result_rows() const override;
  void write_job(JsonWriter& json) const override;

  std::unique_ptr<OpPlan> plan_worlds(const PlanRequest& request) const override {
    return plan_conv1d_backward_worlds(input_, request);
  }
  void prepare(Transport& world, const Options& options) override;
  Backend& backend() override { return backward_->backend(); }
  const KernelEntry& kernel() override { return *backward_->kernel().row; }
  const std::string& kernel_reason() override { return backward_->kernel().reason; }
  int threads() override { return options_.threads; }
  PlanFigures plan(const Collective& collective) override;
  void write_plan(JsonWriter& json) override;
  std::vector<std::string> plan_lines(const PlanFigures& plan) override;
  std::vector<std::string> plan_details() override { return {}; }

  void release() override {
    result_.reset();
    backward_.reset();
  }

  RankFigures run(const ProgressCallback& on_progress = {}) override;
  std::vector<ResultDigest> digests(const Collective& collective) override;
  void write(const OutputRequest& output) override;

  bool measures_exposed_comm() const override { return false; }
  std::vector<Cell> columns(const Totals& totals) const override;
  std::vector<std::string> result_lines(const std::vector<ResultDigest>& digests) const override;
  std::string non_finite_text(const NonFinite& total) const override;
  void write_non_finite(JsonWriter& json, const NonFinite& total) const override;
  Check check_oracle(const Collective& collective, std::int64_t count) override;
  void open_earlier(const std::string& path) override;
  std::vector<FileFingerprint> earlier_fingerprints() const override;
  Check check_earlier(const Collective& collective) override;
  Golden golden() override;
  BenchJob bench_job(std::string source) const override;
  Measured measure(const MeasureRequest& request, const Collective& collective) override;
  VariantTable list_variants(const VariantRequest& request, const Options& options) override;
  void run_variants(Transport& world, const VariantDone& done) override;
  std::vector<std::string_view> lanes() const override { return {"compute"}; }
  std::vector<TraceEvent> timeline() const override { return {}; }

 private:
  const CausalConv1dSpec& spec() const { return input_.spec(); }
  RankFigures figures(const SsmStats& stats, std::int64_t tokens) const;
  RowGrid halos_grid() const;

  Conv1dBackwardInput input_;
  Transport* world_ = nullptr;
  CausalConv1dOptions options_;
  std::optional<Conv1dBackwardPlan> plan_;
  std::optional<CausalConv1dBackward> backward_;
  std::optional<Conv1dBackwardRankResult> result_;
  std::unique_ptr<const SafetensorsFile> earlier_;
  std::vector<SsmShape> shapes_;  // of run_variants()
  double shape_seconds_ = 0.0;    // estimated, on one rank
};

// The digests of all gradients of a result. Collective.
std::vector<ResultDigest> digest_gradients(const Conv1dBackwardInput& input, const Conv1dBackwardRankResult& result,
                                           const Collective& collective);

}  // namespace ringattn
