// SPDX-License-Identifier: Apache-2.0
// Plans of the gated delta rule.
#include <fmt/format.h>

#include <memory>
#include <utility>

#include "ops/gated_delta/gated_delta_op_job.hpp"
#include "ops/ssm/contiguous_plan.hpp"

namespace ringattn {

namespace {

class GatedDeltaPlan final : public OpPlan {
 public:
  GatedDeltaPlan(const GatedDeltaJob& job, PlanRequest request)
      : job_(job),
        request_(std::move(request)),
        choice_(choose_kernel(job.spec, request_.options.kernel, request_.scope)),
        backend_(choice_.row->make_backend({planned_threads(request_.options), kNoDevice})),
        kernel_(choice_.row->make_kernel(job.spec, *backend_)),
        assumed_(default_machine(*choice_.row, *backend_)) {}

  const KernelEntry& kernel() const override { return *choice_.row; }
  const Backend& backend() const override { return *backend_; }
  std::vector<std::string> lines() const override {
    return {fmt::format("kernel: {}", choice_.reason),
            fmt::format("rates: kernel {:.4g} GFLOP/s per rank; machine {}: {:.4g} GB/s, latency {:.4g} us",
                        rate(kManyTokens) / 1e9, machine().name, machine().link_bytes_per_second / 1e9,
                        machine().latency_seconds * 1e6)};
  }
  bool estimates_time() const override { return true; }
  std::vector<Cell> columns() const override { return state_plan_columns("state"); }
  std::string_view unit() const override { return "tokens"; }
  std::int64_t units() const override { return job_.tokens(); }

  PlanRow row(int world, Route, bool details, JsonWriter& json) override {
    // Uses the ranges of heads of a run, which does not know a measured machine.
    SsmPlanSummary summary = summarize_gated_delta_plan(job_, {}, world, *kernel_, assumed_);
    // A machine carries states as much faster than the default one as it computes rows.
    const double carry_scale = choice_.row->speed(job_.spec, *backend_) / rate(kManyTokens);
    const auto rate_of = [this](std::int64_t tokens) { return rate(tokens); };
    summary.seconds = summarize_gated_delta_plan(job_, {}, world, *kernel_, assumed_, rate_of, carry_scale).seconds;
    check_budget(summary.max_memory(), request_.options.memory_budget);
    const std::int64_t state = state_bytes(job_.spec);
    ContiguousPlan plan{summary.layout,
                        summary.max_memory(),
                        state_bytes_received(summary.hops, world, state),
                        gated_delta_token_flops(job_.spec),
                        kSegmentTokens,
                        state,
                        summary.balance()};
    plan.passing_seconds = passing_seconds(job_.spec.value_heads, state, summary, machine());
    if (!job_.update) plan.seconds = summary.seconds;  // a decode step is limited by memory bandwidth, which is unknown
    if (world > 1 && !job_.update) {
      const std::int64_t row_bytes = std::int64_t{job_.spec.value_heads} * job_.spec.value_dim *
                                     static_cast<std::int64_t>(size_of(job_.spec.dtype));
      plan.reshard = attention_reshard(job_.lengths, summary.layout, row_bytes);
    }
    write_contiguous_plan(json, plan);
    return state_plan_row(plan, summary.states_moved(), details, request_.verbose);
  }

 private:
  double rate(std::int64_t tokens) const {
    return machine_speed(request_.options.machine, *choice_.row, job_.spec, job_.spec.dtype, *backend_, tokens);
  }
  const MachineModel& machine() const {
    return request_.options.machine == MachineModel{} ? assumed_ : request_.options.machine;
  }

  const GatedDeltaJob& job_;
  PlanRequest request_;
  GatedDeltaChoice choice_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<GatedDeltaKernel> kernel_;
  MachineModel assumed_;
};

}  // namespace

std::unique_ptr<OpPlan> GatedDeltaOpJob::plan_worlds(const PlanRequest& request) const {
  return std::make_unique<GatedDeltaPlan>(input_.job(), request);
}

}  // namespace ringattn
