// SPDX-License-Identifier: Apache-2.0
// Plans of the gated delta rule.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/gated_delta/gated_delta_op_job.hpp"
#include "ops/reshard/reshard.hpp"
#include "ops/ssm/ssm_op_job.hpp"

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
        assumed_(default_machine(*choice_.row, *backend_)),
        factor_(fp32_machine_factor(request_, *choice_.row, job.spec.dtype, *backend_)) {}

  const KernelEntry& kernel() const override { return *choice_.row; }
  const Backend& backend() const override { return *backend_; }
  std::vector<std::string> lines() const override {
    return {fmt::format("kernel: {}", choice_.reason),
            fmt::format("rates: kernel {:.4g} GFLOP/s per rank; machine {}: {:.4g} GB/s, latency {:.4g} us",
                        assumed_.flops_per_second * factor_ / 1e9, machine().name,
                        machine().link_bytes_per_second / 1e9, machine().latency_seconds * 1e6)};
  }
  bool estimates_time() const override { return true; }
  std::vector<Cell> columns() const override {
    return {{"world", "", ""},
            {"tokens", "", ""},
            {"runs", "", ""},
            {"states", "moved", ""},
            {"state", "(MiB)", ""},
            {"mem/rank", "(MiB, max)", ""},
            {"balance", "(max/mean)", ""},
            {"time", "(ms)", ""},
            {"passing", "(ms)", ""}};
  }
  std::string_view unit() const override { return "tokens"; }
  std::int64_t units() const override { return job_.tokens(); }

  PlanRow row(int world, Route, bool details, JsonWriter& json) override {
    // The ranges of heads are those that a run chooses, which knows no measured machine.
    SsmPlanSummary summary = summarize_gated_delta_plan(job_, {}, world, *kernel_, assumed_);
    summary.seconds /= factor_;
    check_budget(summary.max_memory(), request_.options.memory_budget);
    const std::int64_t state = state_bytes(job_.spec);
    const double passing = passing_seconds(job_.spec.value_heads, state, summary, machine());
    PlanRow row;
    if (details) add_owners(summary, state, row);
    std::optional<AttentionReshard> moved;
    if (world > 1 && !job_.update) {
      const std::int64_t row_bytes = std::int64_t{job_.spec.value_heads} * job_.spec.value_dim *
                                     static_cast<std::int64_t>(size_of(job_.spec.dtype));
      moved = attention_reshard(job_.lengths, summary.layout, row_bytes);
      if (details) row.notes.push_back(moved->text());
    }
    write_row(summary, state, passing, moved, json);
    row.cells = {fmt::format("{}", world),
                 fmt::format("{}", job_.tokens()),
                 fmt::format("{}", summary.layout.owners().size()),
                 fmt::format("{}", summary.states_moved()),
                 mebibytes_text(static_cast<double>(state)),
                 mebibytes_text(static_cast<double>(summary.max_memory().total())),
                 fmt::format("{:.4f}", summary.balance()),
                 job_.update ? "-" : fmt::format("{:.3f}", summary.seconds * 1e3),
                 fmt::format("{:.3f}", passing * 1e3)};
    return row;
  }

 private:
  const MachineModel& machine() const {
    return request_.options.machine == MachineModel{} ? assumed_ : request_.options.machine;
  }

  void add_owners(const SsmPlanSummary& summary, std::int64_t state, PlanRow& row) const {
    const Layout& layout = summary.layout;
    const int shown = request_.verbose ? layout.world() : std::min(layout.world(), kShownRanks);
    for (int rank = 0; rank < shown; ++rank) {
      const std::int64_t bytes = states_received(summary.hops, rank) * state;
      row.lines.push_back(fmt::format("rank {} owns {} tokens, receives {}: {}", rank, layout.tokens(rank),
                                      format_bytes(static_cast<double>(bytes)),
                                      runs_text(layout.runs(rank), request_.verbose)));
    }
    row.ranks_left_out = layout.world() - shown;
  }

  void write_row(const SsmPlanSummary& summary, std::int64_t state, double passing,
                 const std::optional<AttentionReshard>& moved, JsonWriter& json) const {
    const int world = summary.layout.world();
    const double token_flops = gated_delta_token_flops(job_.spec);
    json.begin_object().member("world", world).member("tokens", job_.tokens());
    json.member("layout", layout_name(LayoutKind::kContiguous)).member("stripe", kSegmentTokens);
    json.member("bytes_moved", summary.states_moved() * state).member("state_bytes", state);
    json.member("memory_per_rank", summary.max_memory().total());
    write_memory(json, summary.max_memory());
    json.member("balance", summary.balance());
    if (job_.update) {
      json.key("estimated_ms").null();  // a decode step is memory-bound, and kernels don't report their bandwidth
    } else {
      json.member("estimated_ms", summary.seconds * 1e3);
    }
    json.member("passing_ms", passing * 1e3);
    if (moved) moved->write(json);
    json.member("flops", token_flops * static_cast<double>(job_.tokens()));
    json.key("ranks").begin_array();
    for (int rank = 0; rank < world; ++rank) {
      const std::int64_t tokens = summary.layout.tokens(rank);
      json.begin_object().member("tokens", tokens).member("flops", token_flops * static_cast<double>(tokens));
      json.member("bytes", states_received(summary.hops, rank) * state).end_object();
    }
    json.end_array().end_object();
  }

  const GatedDeltaJob& job_;
  PlanRequest request_;
  GatedDeltaChoice choice_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<GatedDeltaKernel> kernel_;
  MachineModel assumed_;
  double factor_;  // of the given machine model
};

}  // namespace

std::unique_ptr<OpPlan> GatedDeltaOpJob::plan_worlds(const PlanRequest& request) const {
  return std::make_unique<GatedDeltaPlan>(input_.job(), request);
}

}  // namespace ringattn
