// SPDX-License-Identifier: Apache-2.0
// Plans of SSD's gradients.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/ssd_backward/ssd_backward_op_job.hpp"
#include "ops/ssm/ssm_op_job.hpp"

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
        assumed_(default_machine(*choice_.row, *backend_)),
        factor_(fp32_machine_factor(request_, *choice_.row, job_.forward.spec.dtype, *backend_)) {}

  const KernelEntry& kernel() const override { return *choice_.row; }
  const Backend& backend() const override { return *backend_; }
  std::vector<std::string> lines() const override {
    return {fmt::format("kernel: {}", choice_.reason),
            fmt::format("rates: kernel {:.4g} GFLOP/s per rank", assumed_.flops_per_second * factor_ / 1e9)};
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
    plan.seconds /= factor_;
    check_budget(plan.max_memory(), request_.options.memory_budget);
    const std::int64_t state = state_bytes(job_.forward.spec);
    PlanRow row;
    if (details) add_owners(plan, row);
    write_row(json, plan, state);
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
  void add_owners(const SsdBackwardPlan& plan, PlanRow& row) const {
    const int world = plan.layout.world();
    const int shown = request_.verbose ? world : std::min(world, kShownRanks);
    for (int rank = 0; rank < shown; ++rank) {
      const std::int64_t bytes = plan.states_received(rank) * state_bytes(job_.forward.spec);
      row.lines.push_back(fmt::format("rank {} owns {} tokens, receives {}: {}", rank, plan.layout.tokens(rank),
                                      format_bytes(static_cast<double>(bytes)),
                                      runs_text(plan.layout.runs(rank), request_.verbose)));
    }
    row.ranks_left_out = world - shown;
  }

  void write_row(JsonWriter& json, const SsdBackwardPlan& plan, std::int64_t state) const {
    const int world = plan.layout.world();
    const double flops = ssd_backward_token_flops(job_.forward.spec);
    json.begin_object().member("world", world).member("tokens", job_.forward.tokens());
    json.member("layout", layout_name(LayoutKind::kContiguous)).member("stripe", kSuperSegmentTokens);
    json.member("bytes_moved", plan.states_moved() * state).member("state_bytes", state);
    json.member("memory_per_rank", plan.max_memory().total());
    write_memory(json, plan.max_memory());
    json.member("estimated_ms", plan.seconds * 1e3);
    json.member("flops", flops * static_cast<double>(job_.forward.tokens()));
    json.key("ranks").begin_array();
    for (int rank = 0; rank < world; ++rank) {
      const std::int64_t tokens = plan.layout.tokens(rank);
      json.begin_object().member("tokens", tokens).member("flops", flops * static_cast<double>(tokens));
      json.member("bytes", plan.states_received(rank) * state).end_object();
    }
    json.end_array().end_object();
  }

  const SsdBackwardJob& job_;
  PlanRequest request_;
  KernelChoice<SsdBackwardSpec> choice_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<SsdBackwardKernel> kernel_;
  MachineModel assumed_;
  double factor_;  // of the given machine model
};

}  // namespace

std::unique_ptr<OpPlan> plan_ssd_backward_worlds(const SsdBackwardInput& input, const PlanRequest& request) {
  return std::make_unique<PlannedSsdBackward>(input, request);
}

}  // namespace ringattn
