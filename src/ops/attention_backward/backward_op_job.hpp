// SPDX-License-Identifier: Apache-2.0
// The gradients of attention as an OpJob.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/attention_backward/backward_input.hpp"
#include "ops/attention_backward/backward_output_file.hpp"
#include "ops/attention_backward/loaded_backward.hpp"
#include "ops/attention_jobs/shapes.hpp"
#include "ops/jobs/gradient_op_job.hpp"

namespace ringattn {

std::unique_ptr<OpPlan> plan_backward(const BackwardInput& input, const PlanRequest& request);

// The digests of all gradients of a result. Collective.
std::vector<ResultDigest> digest_gradients(const BackwardInput& input, const BackwardRankResult& result,
                                           const Collective& collective);

class BackwardOpJob final : public GradientOpJob<BackwardInput, AttentionBackward, BackwardRankResult> {
 public:
  using GradientOpJob::GradientOpJob;

  std::string_view op() const override;
  std::string describe() const override;
  std::string describe_shape() const override;
  std::vector<MessageTemplate> notes() const override;
  void check_model(const ModelComparison& compare) const override;
  InputShape shape() const override;
  double flops() const override;
  std::int64_t result_rows() const override;
  void write_job(JsonWriter& json) const override;

  std::unique_ptr<OpPlan> plan_worlds(const PlanRequest& request) const override {
    return plan_backward(input_, request);
  }
  void prepare(Transport& world, const Options& options) override;
  int threads() override { return backward_->options().threads; }
  PlanFigures plan(const Collective& collective) override;
  void write_plan(JsonWriter& json) override;
  std::vector<std::string> plan_lines(const PlanFigures& plan) override;
  std::vector<std::string> plan_details() override;

  RankFigures run(const ProgressCallback& on_progress = {}) override;
  void write(const OutputRequest& output) override;

  bool measures_exposed_comm() const override { return true; }
  std::vector<Cell> columns(const Totals& totals) const override;
  std::string non_finite_text(const NonFinite& total) const override;
  void write_non_finite(JsonWriter& json, const NonFinite& total) const override;
  Check check_oracle(const Collective& collective, std::int64_t count) override;
  void open_earlier(const std::string& path) override { earlier_.emplace(path, input_); }
  std::vector<FileFingerprint> earlier_fingerprints() const override { return earlier_->fingerprints(); }
  Check check_earlier(const Collective& collective) override;
  Golden golden() override;
  BenchJob bench_job(std::string source) const override;
  Measured measure(const MeasureRequest& request, const Collective& collective) override;
  VariantTable list_variants(const VariantRequest& request, const Options& options) override;
  void run_variants(Transport& world, const VariantDone& done) override;
  std::vector<std::string_view> lanes() const override { return {"compute", "wait", "transfer"}; }
  std::vector<TraceEvent> timeline() const override;

 private:
  RankFigures figures(const BackwardRankResult& result) const;

  std::optional<BackwardOutputFile> earlier_;
  std::size_t max_state_ = 0;  // bytes on a rank, of plan()
  std::vector<Shape> shapes_;  // of run_variants()
  Options shape_options_;
};

}  // namespace ringattn
