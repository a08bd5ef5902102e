// SPDX-License-Identifier: Apache-2.0
// The gradients of the causal convolution as an OpJob.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/conv1d_backward/conv1d_backward_input.hpp"
#include "ops/conv1d_backward/conv1d_backward_plan.hpp"
#include "ops/conv1d_backward/loaded_conv1d_backward.hpp"
#include "ops/ssm/ssm_gradient_op_job.hpp"

namespace ringattn {

std::unique_ptr<OpPlan> plan_conv1d_backward_worlds(const Conv1dBackwardInput& input, const PlanRequest& request);

// The digests of all gradients of a result. Collective.
std::vector<ResultDigest> digest_gradients(const Conv1dBackwardInput& input, const Conv1dBackwardRankResult& result,
                                           const Collective& collective);

class Conv1dBackwardOpJob final : public SsmGradientOpJob<Conv1dBackwardInput, CausalConv1dBackward,
                                                          Conv1dBackwardRankResult, LoadedConv1dBackward> {
 public:
  using SsmGradientOpJob::SsmGradientOpJob;

  std::string_view op() const override;
  std::string describe() const override;
  std::string describe_shape() const override { return "backward of " + ringattn::describe(spec()); }
  InputShape shape() const override;
  double flops() const override;
  std::int64_t result_rows() const override;
  void write_job(JsonWriter& json) const override;

  std::unique_ptr<OpPlan> plan_worlds(const PlanRequest& request) const override {
    return plan_conv1d_backward_worlds(input_, request);
  }
  void prepare(Transport& world, const Options& options) override;
  PlanFigures plan(const Collective& collective) override;
  void write_plan(JsonWriter& json) override;

  void write(const OutputRequest& output) override;

  bool measures_exposed_comm() const override { return false; }
  std::vector<Cell> columns(const Totals& totals) const override;
  std::string non_finite_text(const NonFinite& total) const override;
  Check check_oracle(const Collective& collective, std::int64_t count) override;
  Golden golden() override;
  BenchJob bench_job(std::string source) const override;

 private:
  const CausalConv1dSpec& spec() const { return input_.spec(); }
  std::string sent_text(std::int64_t bytes) const override;
  RankFigures figures(const SsmStats& stats, std::int64_t tokens) const override;
  double token_bytes() const override;
  RowGrid halos_grid() const;
  std::vector<OutputTensor> gradients() const override;
  std::string first_difference(const Collective& collective) override;
  double keep_for_shapes(const Options& options) override;
  std::vector<ResultDigest> run_shape(const SsmShape& shape, Transport& part, const Collective& own) override;

  CausalConv1dOptions options_;
  std::optional<Conv1dBackwardPlan> plan_;
};

}  // namespace ringattn
