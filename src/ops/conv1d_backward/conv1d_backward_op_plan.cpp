// SPDX-License-Identifier: Apache-2.0
// Plans of the gradients of the causal convolution.
#include <fmt/format.h>

#include <memory>
#include <utility>

#include "ops/conv1d_backward/conv1d_backward_op_job.hpp"
#include "ops/ssm/contiguous_plan.hpp"

namespace ringattn {

namespace {

class PlannedConv1dBackward final : public OpPlan {
 public:
  PlannedConv1dBackward(const Conv1dBackwardInput& input, PlanRequest request)
      : job_(input.job()),
        tokens_(input.forward().job().tokens()),
        request_(std::move(request)),
        choice_(choose_kernel(job_.spec, request_.options.kernel, request_.scope)),
        backend_(choice_.row->make_backend({planned_threads(request_.options), kNoDevice})),
        rate_(machine_speed(request_.options.machine, *choice_.row, job_.spec, job_.spec.dtype, *backend_,
                            kManyTokens)) {}

  const KernelEntry& kernel() const override { return *choice_.row; }
  const Backend& backend() const override { return *backend_; }
  std::vector<std::string> lines() const override {
    return {fmt::format("kernel: {}", choice_.reason),
            fmt::format("rates: kernel {:.4g} GFLOP/s per rank", rate_ / 1e9)};
  }
  bool estimates_time() const override { return true; }
  std::vector<Cell> columns() const override {
    return {{"world", "", ""},
            {"tokens", "", ""},
            {"runs", "", ""},
            {"moved", "(MiB)", ""},
            {"mem/rank", "(MiB, max)", ""},
            {"scratch", "(MiB)", ""},
            {"time", "(ms)", ""}};
  }
  std::string_view unit() const override { return "tokens"; }
  std::int64_t units() const override { return tokens_; }
  PlanRow row(int world, Route, bool details, JsonWriter& json) override {
    const Conv1dBackwardPlan plan = plan_conv1d_backward(job_, {}, world, rate_);
    check_budget(plan.max_memory(), request_.options.memory_budget);
    PlanRow row;
    ContiguousPlan world_plan{plan.layout, plan.max_memory(), plan.received, conv1d_backward_token_flops(job_.spec),
                              kSuperSegmentTokens};
    world_plan.seconds = plan.seconds;
    if (details) add_owners(world_plan, request_.verbose, row);
    write_contiguous_plan(json, world_plan);
    const SsmMemory& memory = plan.max_memory();
    row.cells = {fmt::format("{}", world),
                 fmt::format("{}", tokens_),
                 fmt::format("{}", plan.layout.owners().size()),
                 mebibytes_text(static_cast<double>(plan.bytes_moved())),
                 mebibytes_text(static_cast<double>(memory.total())),
                 mebibytes_text(static_cast<double>(memory.own())),
                 fmt::format("{:.3f}", plan.seconds * 1e3)};
    return row;
  }

 private:
  const CausalConv1dJob& job_;
  std::int64_t tokens_;
  PlanRequest request_;
  KernelChoice<CausalConv1dSpec> choice_;
  std::unique_ptr<Backend> backend_;
  double rate_;  // FLOPs a second
};

}  // namespace

std::unique_ptr<OpPlan> plan_conv1d_backward_worlds(const Conv1dBackwardInput& input, const PlanRequest& request) {
  return std::make_unique<PlannedConv1dBackward>(input, request);
}

}  // namespace ringattn
