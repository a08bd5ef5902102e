// SPDX-License-Identifier: Apache-2.0
// The gradients of SSD as an OpJob.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors_file.hpp"
#include "ops/common/op_job.hpp"
#include "ops/ssd_backward/loaded_ssd_backward.hpp"
#include "ops/ssd_backward/ssd_backward_input.hpp"
#include "ops/ssm/ssm_shapes.hpp"

namespace ringattn {

std::unique_ptr<OpPlan> plan_ssd_backward_worlds(const SsdBackwardInput& input, const PlanRequest& request);

class SsdBackwardOpJob final : public OpJob {
 public:
  explicit SsdBackwardOpJob(const OpRequest& request) : input_(request) {}

  std::string_view op() const override;
  std::string describe() const override;
  std::string describe_shape() const override;
  std::string source() const override { return input_.source(); }
  std::vector<FileFingerprint> fingerprints() const override { return input_.fingerprints(); }
  UnreadTensors unread() const override { return input_.unread(); }
  InputShape shape() const override;
  double flops() const override;
  std::int64_t result_rows() const override;
  void write_job(JsonWriter& json) const override;

  std::unique_ptr<OpPlan> plan_worlds(const PlanRequest& request) const override {
    return plan_ssd_backward_worlds(input_, request);
  }
  void prepare(Transport& world, const Options& options) override;
  Backend& backend() override { return backward_->backend(); }
  const KernelEntry& kernel() override { return *backward_->kernel().row; }
  const std::string& kernel_reason() override { return backward_->kernel().reason; }
  int threads() override { return backward_->options().threads; }
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
  std::vector<std::string_view> lanes() const override { return {"compute"}; }
  std::vector<TraceEvent> timeline() const override { return {}; }

 private:
  const SsmSpec& spec() const { return input_.job().forward.spec; }
  RankFigures figures(const SsmStats& stats, std::int64_t tokens) const;

  SsdBackwardInput input_;
  Transport* world_ = nullptr;
  std::optional<SsdBackward> backward_;
  std::optional<SsdBackwardRankResult> result_;
  std::unique_ptr<const SafetensorsFile> earlier_;
  std::string earlier_path_;
  std::vector<SsmShape> shapes_;  // of run_variants()
  SsmOptions shape_options_;
  double shape_seconds_ = 0.0;  // estimated, on one rank
};

// The digests of all gradients of a result. Collective.
std::vector<ResultDigest> digest_gradients(const SsdBackwardInput& input, const SsdBackwardRankResult& result,
                                           const Collective& collective);

}  // namespace ringattn
