// SPDX-License-Identifier: Apache-2.0
// Plans of SSD's gradients.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "ops/ssd_backward/ssd_backward_op_job.hpp"
#include "ops/ssm/contiguous_plan.hpp"

namespace ringattn {

namespace {

class PlannedSsdBackward final : public OpPlan {
 public:
  PlannedSsdBackward(const SsdBackwardInput& input, PlanRequest request)
      : job_(input.job()),
        request_(std::move(request)),
        choice_(choose_kernel(backward_spec(job_), request_.options.kernel, request_.scope)),
        backend_(choice_.row->make_backend({planned_threads(request_.options), kNoDevice})),
        kernel_(choice_.row->make_kernel(backward_spec(job_), *backend_)),
        assumed_(default_machine(*choice_.row, *backend_)) {}

  const KernelEntry& kernel() const override { return *choice_.row; }
  const Backend& backend() const override { return *backend_; }
  std::vector<std::string> lines() const override {
    return {fmt::format("kernel: {}", choice_.reason),
            fmt::format("rates: kernel {:.4g} GFLOP/s per rank", rate(kManyTokens) / 1e9)};
  }
  bool estimates_time() const override { return true; }
  std::vector<Cell> columns() const override {
    return {{"world", "", ""},        {"tokens", "", ""},     {"runs", "", ""},
            {"states", "moved", ""},  {"state", "(MiB)", ""}, {"mem/rank", "(MiB, max)", ""},
            {"scratch", "(MiB)", ""}, {"time", "(ms)", ""}};
  }
  std::string_view unit() const override { return "tokens"; }
  std::int64_t units() const override { return job_.forward.tokens(); }
  PlanRow row(int world, Route, bool details, JsonWriter& json) override {
    check_ssm_budget(job_.forward, world, request_.options.memory_budget);
    SsdBackwardPlan plan = plan_ssd_backward(job_, {}, world, *kernel_, assumed_);
    std::int64_t max_tokens = 0;
    for (int rank = 0; rank < world; ++rank) max_tokens = std::max(max_tokens, plan.layout.tokens(rank));
    plan.seconds = ssd_backward_token_flops(job_.forward.spec) * static_cast<double>(max_tokens) / rate(max_tokens);
    check_budget(plan.max_memory(), request_.options.memory_budget);
    const std::int64_t state = state_bytes(job_.forward.spec);
    ContiguousPlan world_plan{
        plan.layout, plan.max_memory(), {}, ssd_backward_token_flops(job_.forward.spec), kSuperSegmentTokens, state};
    for (int rank = 0; rank < world; ++rank) world_plan.received.push_back(plan.states_received(rank) * state);
    world_plan.seconds = plan.seconds;
    PlanRow row;
    if (details) add_owners(world_plan, request_.verbose, row);
    write_contiguous_plan(json, world_plan);
    const SsmMemory& memory = plan.max_memory();
    row.cells = {fmt::format("{}", world),
                 fmt::format("{}", job_.forward.tokens()),
                 fmt::format("{}", plan.layout.owners().size()),
                 fmt::format("{}", plan.states_moved()),
                 mebibytes_text(static_cast<double>(state)),
                 mebibytes_text(static_cast<double>(memory.total())),
                 mebibytes_text(static_cast<double>(memory.scratch)),
                 fmt::format("{:.3f}", plan.seconds * 1e3)};
    return row;
  }

 private:
  double rate(std::int64_t tokens) const {
    return machine_speed(request_.options.machine, *choice_.row, backward_spec(job_), job_.forward.spec.dtype,
                         *backend_, tokens);
  }

  const SsdBackwardJob& job_;
  PlanRequest request_;
  KernelChoice<SsdBackwardSpec> choice_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<SsdBackwardKernel> kernel_;
  MachineModel assumed_;
};

}  // namespace

std::unique_ptr<OpPlan> plan_ssd_backward_worlds(const SsdBackwardInput& input, const PlanRequest& request) {
  return std::make_unique<PlannedSsdBackward>(input, request);
}

}  // namespace ringattn
