// SPDX-License-Identifier: Apache-2.0
// Plans of SSM ops.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "attention/tokens/cost.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/reshard/reshard.hpp"
#include "ops/ssm/ssm_op_job.hpp"
#include "ops/ssm/ssm_plan_summary.hpp"

namespace ringattn {

namespace {

void add_owners(const SsmPlanSummary& summary, const SsmJob& job, bool verbose, PlanRow& row) {
  const Layout& layout = summary.layout;
  const int world = layout.world();
  const int shown = verbose ? world : std::min(world, kShownRanks);
  for (int rank = 0; rank < shown; ++rank) {
    const std::int64_t states = states_received(summary.hops, rank);
    row.lines.push_back(fmt::format("rank {} owns {} tokens, receives {}: {}", rank, layout.tokens(rank),
                                    format_bytes(static_cast<double>(states * carried_bytes(job))),
                                    runs_text(layout.runs(rank), verbose)));
  }
  row.ranks_left_out = world - shown;
}

std::vector<std::string> summary_cells(const SsmJob& job, const SsmPlanSummary& summary, double passing) {
  const SsmMemory& memory = summary.max_memory();
  return {fmt::format("{}", summary.layout.world()),
          fmt::format("{}", job.tokens()),
          fmt::format("{}", summary.layout.owners().size()),
          fmt::format("{}", summary.states_moved()),
          mebibytes_text(static_cast<double>(carried_bytes(job))),
          mebibytes_text(static_cast<double>(memory.total())),
          fmt::format("{:.4f}", summary.balance()),
          job.update ? "-" : fmt::format("{:.3f}", summary.seconds * 1e3),
          fmt::format("{:.3f}", passing * 1e3)};
}

void write_row(JsonWriter& json, const SsmJob& job, const SsmPlanSummary& summary, double passing,
               const std::optional<AttentionReshard>& moved) {
  const std::int64_t state = carried_bytes(job);
  const int world = summary.layout.world();
  json.begin_object().member("world", world).member("tokens", job.tokens());
  json.member("layout", layout_name(LayoutKind::kContiguous)).member("stripe", kSuperSegmentTokens);
  json.member("bytes_moved", summary.states_moved() * state).member("state_bytes", state);
  json.member("memory_per_rank", summary.max_memory().total());
  write_memory(json, summary.max_memory());
  json.member("balance", summary.balance());
  if (job.update) {
    json.key("estimated_ms").null();  // a decode step is memory-bound, and kernels don't report their bandwidth
  } else {
    json.member("estimated_ms", summary.seconds * 1e3);
  }
  json.member("passing_ms", passing * 1e3);
  if (moved) moved->write(json);
  json.member("flops", ssm_token_flops(job) * static_cast<double>(job.tokens()));
  json.key("ranks").begin_array();
  for (int rank = 0; rank < world; ++rank) {
    const std::int64_t tokens = summary.layout.tokens(rank);
    json.begin_object().member("tokens", tokens);
    json.member("flops", ssm_token_flops(job) * static_cast<double>(tokens));
    json.member("bytes", states_received(summary.hops, rank) * state).end_object();
  }
  json.end_array().end_object();
}

class SsmPlan final : public OpPlan {
 public:
  SsmPlan(const SsmInput& input, PlanRequest request)
      : input_(input),
        request_(std::move(request)),
        choice_(choose_kernel(input_.job(), request_.options.kernel, request_.scope)),
        backend_(choice_.row->make_backend({planned_threads(request_.options), kNoDevice})),
        kernel_(choice_.ssm ? choice_.ssm->make_kernel(input_.job().spec, *backend_) : nullptr),
        assumed_(default_machine(*choice_.row, *backend_)),
        conv1d_rate_(conv1d_rate(input_.job(), choice_, *backend_, request_.scope)),
        factor_(fp32_machine_factor(request_, *choice_.row, input_.job().spec.dtype, *backend_)) {}

  const KernelEntry& kernel() const override { return *choice_.row; }
  const Backend& backend() const override { return *backend_; }
  std::vector<std::string> lines() const override {
    return {fmt::format("kernel: {}", choice_.reason),
            fmt::format("rates: kernel {:.4g} GFLOP/s per rank{}; machine {}: {:.4g} GB/s, latency {:.4g} us",
                        assumed_.flops_per_second * factor_ / 1e9,
                        conv1d_rate_ > 0.0 ? fmt::format(", conv1d {:.4g}", conv1d_rate_ * factor_ / 1e9) : "",
                        machine().name, machine().link_bytes_per_second / 1e9, machine().latency_seconds * 1e6)};
  }
  bool estimates_time() const override { return true; }
  std::vector<Cell> columns() const override {
    const bool conv1d = input_.job().conv1d_only;
    return {{"world", "", ""},
            {"tokens", "", ""},
            {"runs", "", ""},
            {conv1d ? "halos" : "states", "moved", ""},
            {conv1d ? "halo" : "state", "(MiB)", ""},
            {"mem/rank", "(MiB, max)", ""},
            {"balance", "(max/mean)", ""},
            {"time", "(ms)", ""},
            {"passing", "(ms)", ""}};
  }
  std::string_view unit() const override { return "tokens"; }
  std::int64_t units() const override { return input_.job().tokens(); }
  PlanRow row(int world, Route, bool details, JsonWriter& json) override {
    const SsmJob& job = input_.job();
    const std::size_t budget = request_.options.memory_budget;
    check_ssm_budget(job, world, budget);
    // The ranges of heads are those that a run chooses, which knows no measured machine.
    SsmPlanSummary summary =
        summarize_ssm_plan(job, {}, world, kernel_.get(), assumed_, conv1d_rate_,
                           [&](std::int64_t tokens) { return ssm_rate(job, choice_, *backend_, tokens); });
    summary.seconds /= factor_;
    check_budget(summary.max_memory(), budget);
    const double passing = passing_seconds(job, summary, machine());
    PlanRow row;
    if (details) add_owners(summary, job, request_.verbose, row);
    std::optional<AttentionReshard> moved;
    if (world > 1 && !job.update && !job.conv1d_only) {
      const std::int64_t row_bytes =
          std::int64_t{job.spec.heads} * job.spec.head_dim * static_cast<std::int64_t>(size_of(job.spec.dtype));
      moved = attention_reshard(job.lengths, summary.layout, row_bytes);
      if (details) row.notes.push_back(moved->text());
    }
    write_row(json, job, summary, passing, moved);
    row.cells = summary_cells(job, summary, passing);
    return row;
  }

 private:
  const MachineModel& machine() const {
    return request_.options.machine == MachineModel{} ? assumed_ : request_.options.machine;
  }

  const SsmInput& input_;
  PlanRequest request_;
  SsmJobChoice choice_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<SsmKernel> kernel_;
  MachineModel assumed_;
  double conv1d_rate_;  // operations a second
  double factor_;       // of the given machine model, for both rates
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
