// SPDX-License-Identifier: Apache-2.0
// SSD, selective scan and the causal convolution as an OpJob.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ops/jobs/op_job.hpp"
#include "ops/ssm/loaded_ssm.hpp"
#include "ops/ssm/ssm_output.hpp"
#include "ops/ssm/ssm_plan_summary.hpp"
#include "ops/ssm/ssm_shapes.hpp"

namespace ringattn {

class SsmOpJob final : public OpJob {
 public:
  // The ranks agree on the input. `timeline`: a run also records when each phase was done.
  explicit SsmOpJob(SsmInput input, bool timeline = false) : input_(std::move(input)), timeline_(timeline) {}

  const SsmInput& input() const { return input_; }
  // The result of the last run().
  const SsmRankResult& result() const { return *result_; }

  std::string_view op() const override { return op_name(input_.op()); }
  std::string describe() const override { return ringattn::describe(input_.job()); }
  std::string describe_shape() const override;
  std::string source() const override { return input_.source(); }
  std::vector<FileFingerprint> fingerprints() const override { return input_.fingerprints(); }
  void check_model(const ModelComparison& compare) const override;
  UnreadTensors unread() const override { return input_.unread(); }
  InputShape shape() const override;
  double flops() const override;
  std::int64_t result_rows() const override { return input_.job().tokens() * input_.job().spec.heads; }
  void write_job(JsonWriter& json) const override;

  std::unique_ptr<OpPlan> plan_worlds(const PlanRequest& request) const override;
  void prepare(Transport& world, const Options& options) override;
  Backend& backend() override { return prepared_->ssm().backend(); }
  const KernelEntry& kernel() override { return *prepared_->ssm().kernel().row; }
  const std::string& kernel_reason() override { return prepared_->ssm().kernel().reason; }
  int threads() override { return prepared_->ssm().options().threads; }
  PlanFigures plan(const Collective& collective) override;
  void write_plan(JsonWriter& json) override;
  std::vector<std::string> plan_lines(const PlanFigures& plan) override;
  std::vector<std::string> plan_details() override { return {}; }

  void release() override {
    result_.reset();
    prepared_.reset();
  }

  RankFigures run(const ProgressCallback& on_progress = {}) override;
  std::vector<ResultDigest> digests(const Collective& collective) override;
  void write(const OutputRequest& output) override;

  bool measures_exposed_comm() const override { return !input_.job().conv1d_only; }
  std::vector<Cell> columns(const Totals& totals) const override;
  std::vector<std::string> result_lines(const std::vector<ResultDigest>& digests) const override;
  std::string non_finite_text(const NonFinite& total) const override;
  void write_non_finite(JsonWriter& json, const NonFinite& total) const override;
  Check check_oracle(const Collective& collective, std::int64_t count) override;
  void open_earlier(const std::string& path) override { earlier_.emplace(path, input_); }
  std::vector<FileFingerprint> earlier_fingerprints() const override { return earlier_->fingerprints(); }
  Check check_earlier(const Collective& collective) override;
  Golden golden() override { return golden_of(input_, kernel().name, identity_of(kernel(), backend())); }
  BenchJob bench_job(std::string source) const override;
  Measured measure(const MeasureRequest& request, const Collective& collective) override;
  VariantTable list_variants(const VariantRequest& request, const Options& options) override;
  void run_variants(Transport& world, const VariantDone& done) override;
  std::vector<std::string_view> lanes() const override { return {"compute", "wait", "finish", "states"}; }
  std::vector<TraceEvent> timeline() const override;

 private:
  RankFigures figures(const SsmRankResult& result);
  void check_linear_attention(const ModelComparison& compare) const;

  SsmInput input_;
  bool timeline_;
  std::optional<PreparedSsm> prepared_;
  std::optional<SsmRankResult> result_;
  SsmDigests digests_;  // of result()
  std::optional<SsmOutputFile> earlier_;
  std::vector<SsmShape> shapes_;  // of run_variants()
  SsmOptions shape_options_;
  double shape_seconds_ = 0.0;  // estimated, on one rank
};

// Converts ring options for an SSM op, which has no blocks and no layout.
SsmOptions ssm_options(const Options& options, bool timeline = false);

// Members of a report's "job".
void write_ssm_spec(JsonWriter& json, const SsmSpec& spec);
// The member "memory" of a report: bytes on a rank.
void write_memory(JsonWriter& json, const SsmMemory& memory);

}  // namespace ringattn
