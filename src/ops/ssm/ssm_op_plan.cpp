// SPDX-License-Identifier: Apache-2.0
// Plans of SSM ops.
#include <fmt/format.h>

#include <memory>
#include <utility>

#include "attention/tokens/cost.hpp"
#include "base/json_writer.hpp"
#include "ops/ssm/contiguous_plan.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

namespace {

class SsmPlan final : public OpPlan {
 public:
  SsmPlan(const SsmInput& input, PlanRequest request)
      : input_(input),
        request_(std::move(request)),
        choice_(choose_kernel(input_.job(), request_.options.kernel, request_.scope)),
        backend_(choice_.row->make_backend({planned_threads(request_.options), kNoDevice})),
        kernel_(choice_.ssm ? choice_.ssm->make_kernel(input_.job().spec, *backend_) : nullptr),
        assumed_(default_machine(*choice_.row, *backend_)),
        assumed_conv1d_rate_(conv1d_rate(input_.job(), choice_, *backend_, request_.scope)),
        conv1d_rate_(conv1d_rate(input_.job(), choice_, *backend_, request_.scope, request_.options.machine)) {}

  const KernelEntry& kernel() const override { return *choice_.row; }
  const Backend& backend() const override { return *backend_; }
  std::vector<std::string> lines() const override {
    return {fmt::format("kernel: {}", choice_.reason),
            fmt::format("rates: kernel {:.4g} GFLOP/s per rank{}; machine {}: {:.4g} GB/s, latency {:.4g} us",
                        rate(kManyTokens) / 1e9,
                        conv1d_rate_ > 0.0 ? fmt::format(", conv1d {:.4g}", conv1d_rate_ / 1e9) : "", machine().name,
                        machine().link_bytes_per_second / 1e9, machine().latency_seconds * 1e6)};
  }
  bool estimates_time() const override { return true; }
  std::vector<Cell> columns() const override { return state_plan_columns(input_.job().conv1d_only ? "halo" : "state"); }
  std::string_view unit() const override { return "tokens"; }
  std::int64_t units() const override { return input_.job().tokens(); }
  PlanRow row(int world, Route, bool details, JsonWriter& json) override {
    const SsmJob& job = input_.job();
    const std::size_t budget = request_.options.memory_budget;
    check_ssm_budget(job, world, budget);
    // Uses the ranges of heads of a run, which does not know a measured machine.
    SsmPlanSummary summary =
        summarize_ssm_plan(job, {}, world, kernel_.get(), assumed_, assumed_conv1d_rate_,
                           [&](std::int64_t tokens) { return ssm_rate(job, choice_, *backend_, tokens); });
    if (is_measured()) {
      summary.seconds =
          summarize_ssm_plan(job, {}, world, kernel_.get(), assumed_, conv1d_rate_, [&](std::int64_t tokens) {
            return rate(tokens);
          }).seconds;
    }
    check_budget(summary.max_memory(), budget);
    ContiguousPlan plan{
        summary.layout,       summary.max_memory(), state_bytes_received(summary.hops, world, carried_bytes(job)),
        ssm_token_flops(job), kSuperSegmentTokens,  carried_bytes(job),
        summary.balance()};
    plan.passing_seconds = passing_seconds(job, summary, machine());
    if (!job.update) plan.seconds = summary.seconds;  // a decode step is limited by memory bandwidth, which is unknown
    if (world > 1 && !job.update && !job.conv1d_only) {
      const std::int64_t row_bytes =
          std::int64_t{job.spec.heads} * job.spec.head_dim * static_cast<std::int64_t>(size_of(job.spec.dtype));
      plan.reshard = attention_reshard(job.lengths, summary.layout, row_bytes);
    }
    write_contiguous_plan(json, plan);
    return state_plan_row(plan, summary.states_moved(), details, request_.verbose);
  }

 private:
  bool is_measured() const { return request_.options.machine != MachineModel{}; }
  const MachineModel& machine() const { return is_measured() ? request_.options.machine : assumed_; }
  double rate(std::int64_t tokens) const {
    return ssm_rate(input_.job(), choice_, *backend_, tokens, request_.options.machine);
  }

  const SsmInput& input_;
  PlanRequest request_;
  SsmJobChoice choice_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<SsmKernel> kernel_;
  MachineModel assumed_;
  double assumed_conv1d_rate_;  // operations per second
  double conv1d_rate_;          // the same on the given machine
};

}  // namespace

std::unique_ptr<OpPlan> SsmOpJob::plan_worlds(const PlanRequest& request) const {
  return std::make_unique<SsmPlan>(input_, request);
}

std::string SsmOpJob::describe_shape() const {
  const SsmJob& job = input_.job();
  return job.conv1d_only ? ringattn::describe(*job.convolution) : ringattn::describe(job.spec);
}

}  // namespace ringattn
