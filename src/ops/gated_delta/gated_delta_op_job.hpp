// SPDX-License-Identifier: Apache-2.0
// The gated delta rule as an OpJob.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ops/gated_delta/gated_delta.hpp"
#include "ops/gated_delta/gated_delta_input.hpp"
#include "ops/gated_delta/loaded_gated_delta.hpp"
#include "ops/jobs/op_job.hpp"
#include "ops/ssm/ssm_shapes.hpp"

namespace ringattn {

class GatedDeltaOpJob final : public OpJob {
 public:
  // `timeline`: a run also records when each phase was done.
  GatedDeltaOpJob(GatedDeltaInput input, bool timeline) : input_(std::move(input)), timeline_(timeline) {}

  std::string_view op() const override { return "gated_delta"; }
  std::string describe() const override { return ringattn::describe(input_.job()); }
  std::string describe_shape() const override { return ringattn::describe(input_.job().spec); }
  std::string source() const override { return input_.source(); }
  std::vector<FileFingerprint> fingerprints() const override { return input_.fingerprints(); }
  void check_model(const ModelComparison& compare) const override;
  UnreadTensors unread() const override { return input_.unread(); }
  InputShape shape() const override;
  double flops() const override {
    return gated_delta_token_flops(input_.job().spec) * static_cast<double>(input_.job().tokens());
  }
  std::int64_t result_rows() const override { return input_.job().tokens() * input_.job().spec.value_heads; }
  void write_job(JsonWriter& json) const override;

  std::unique_ptr<OpPlan> plan_worlds(const PlanRequest& request) const override;
  void prepare(Transport& world, const Options& options) override;
  Backend& backend() override { return rule_->backend(); }
  const KernelEntry& kernel() override { return *rule_->kernel().row; }
  const std::string& kernel_reason() override { return rule_->kernel().reason; }
  int threads() override { return rule_->options().threads; }
  PlanFigures plan(const Collective& collective) override;
  void write_plan(JsonWriter& json) override;
  std::vector<std::string> plan_lines(const PlanFigures& plan) override;
  std::vector<std::string> plan_details() override { return {}; }
  void release() override;

  RankFigures run(const ProgressCallback& on_progress = {}) override;
  std::vector<ResultDigest> digests(const Collective& collective) override;
  void write(const OutputRequest& output) override;

  bool measures_exposed_comm() const override { return true; }
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
  std::vector<std::string_view> lanes() const override { return {"compute", "wait", "finish", "states"}; }
  std::vector<TraceEvent> timeline() const override;

 private:
  // The output file of an earlier run.
  struct Earlier {
    std::unique_ptr<const SafetensorsFile> file;
    TensorSource out;
    std::optional<TensorSource> states;
  };

  GatedDeltaResult run_variant(const SsmShape& variant, Transport& world, std::int64_t& moved) const;
  RankFigures figures(const GatedDeltaResult& result);
  std::vector<ResultDigest> digests_of(const GatedDeltaResult& result, const Collective& collective) const;
  RowGrid states_grid() const;

  GatedDeltaInput input_;
  bool timeline_;
  std::optional<Collective> collective_;
  std::optional<GatedDelta> rule_;
  std::optional<GatedDeltaResult> result_;
  std::vector<ResultDigest> digests_;
  std::optional<Earlier> earlier_;
  std::vector<SsmShape> variants_;
  SsmOptions variant_options_;
  double variant_seconds_ = 0.0;  // estimated, on one rank
};

}  // namespace ringattn
