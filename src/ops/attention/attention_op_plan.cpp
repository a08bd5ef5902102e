// SPDX-License-Identifier: Apache-2.0
// Plans of ops around the ring, and those of attention and MLA.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/json_writer.hpp"
#include "ops/attention/attention_op_job.hpp"
#include "ops/attention/ring_plan.hpp"
#include "ops/attention/world_plan_summary.hpp"
#include "ops/attention_jobs/planned_job.hpp"
#include "ops/jobs/ring_report.hpp"

namespace ringattn {

namespace {

void add_owners(const WorldPlanSummary& summary, bool verbose, PlanRow& row) {
  const Layout& queries = summary.layout.queries;
  const int shown = verbose ? summary.world() : std::min(summary.world(), kShownRanks);
  row.lines.push_back(fmt::format("layout: {}", layout_text(summary.layout.request)));
  for (int rank = 0; rank < shown; ++rank) {
    row.lines.push_back(fmt::format("rank {} owns {} queries, {} keys: {}", rank, queries.tokens(rank),
                                    summary.layout.keys.tokens(rank), runs_text(queries.runs(rank), verbose)));
  }
  row.ranks_left_out = summary.world() - shown;
}

void add_blocks(const WorldPlanSummary& summary, PlanRow& row) {
  row.block_columns = {{"block", "", ""},
                       {"first key", "", ""},
                       {"last key", "", ""},
                       {"bytes/rank", "(MiB, max)", ""},
                       {"work/rank", "(GFLOP, max)", ""},
                       {"balance", "(max/mean)", ""}};
  for (std::size_t b = 0; b < summary.blocks.size(); ++b) {
    const BlockPlanSummary& block = summary.blocks[b];
    row.blocks.push_back(
        {fmt::format("{}", b), fmt::format("{}", block.first_token), fmt::format("{}", block.last_token),
         mebibytes_text(static_cast<double>(block.max_bytes_received)), fmt::format("{:.4g}", block.max_flops / 1e9),
         fmt::format("{:.4f}", block.balance(summary.world()))});
  }
}

std::vector<std::string> summary_cells(const WorldPlanSummary& summary) {
  const std::int64_t stripe = summary.layout.request.stripe;
  return {fmt::format("{}", summary.world()),
          fmt::format("{}", summary.q_tokens),
          stripe > 0 ? fmt::format("{}", stripe) : "varies",
          fmt::format("{}", summary.blocks.size()),
          mebibytes_text(static_cast<double>(summary.max_bytes_received)),
          mebibytes_text(static_cast<double>(summary.max_memory)),
          fmt::format("{:.4f}", summary.balance()),
          fmt::format("{:.3f}", summary.seconds * 1e3),
          fmt::format("{:.3f}", summary.exposed_comm_seconds * 1e3),
          fmt::format("{:.1f}", summary.flops_per_second_per_rank() / 1e9)};
}

void write_row(JsonWriter& json, const PlannedRing& planned, const WorldPlanSummary& summary) {
  json.begin_object().member("world", summary.world()).member("tokens", summary.q_tokens);
  planned.write(json, summary);
  json.member("layout", layout_name(summary.layout.request.kind)).member("stripe", summary.layout.request.stripe);
  json.member("bytes_per_rank", summary.max_bytes_received).member("bytes_moved", summary.bytes_received);
  json.member("memory_per_rank", summary.max_memory).member("balance", summary.balance());
  json.member("flops", summary.flops()).member("estimated_ms", summary.seconds * 1e3);
  json.member("exposed_comm_ms", summary.exposed_comm_seconds * 1e3);
  json.key("blocks").begin_array();
  for (const BlockPlanSummary& block : summary.blocks) {
    json.begin_object().member("first_token", block.first_token).member("last_token", block.last_token);
    json.member("bytes_per_rank", block.max_bytes_received).member("bytes_moved", block.bytes_received);
    json.member("flops", block.flops).member("flops_max", block.max_flops).end_object();
  }
  json.end_array();
  json.key("ranks").begin_array();
  for (int rank = 0; rank < summary.world(); ++rank) {
    json.begin_object().member("queries", summary.layout.queries.tokens(rank));
    json.member("keys", summary.layout.keys.tokens(rank));
    json.member("flops", summary.rank_flops[static_cast<std::size_t>(rank)]).end_object();
  }
  json.end_array().end_object();
}

class RingPlan final : public OpPlan {
 public:
  RingPlan(PlanRequest request, const MakePlannedRing& make)
      : request_(std::move(request)), planned_(make(request_.options)) {}

  const KernelEntry& kernel() const override { return planned_->kernel(); }
  const Backend& backend() const override { return planned_->backend(); }
  std::vector<std::string> lines() const override {
    std::vector<std::string> lines{
        fmt::format("kernel: {}; tiles of {} keys", planned_->kernel_reason(), planned_->key_tile())};
    for (std::string& line : planned_->lines()) lines.push_back(std::move(line));
    const MachineModel machine = planned_->machine(request_.options.machine, kManyTokens);
    lines.push_back(fmt::format("machine: {}; {:.4g} GFLOP/s and {:.4g} GB/s a rank, latency {:.4g} us", machine.name,
                                machine.flops_per_second / 1e9, machine.link_bytes_per_second / 1e9,
                                machine.latency_seconds * 1e6));
    return lines;
  }
  bool estimates_time() const override { return true; }
  std::string length_text() const override { return planned_->length_text(); }
  std::vector<Cell> columns() const override {
    return {{"world", "", ""},
            {"tokens", "", ""},
            {"stripe", "", ""},
            {"blocks", "", ""},
            {"bytes/rank", "(MiB, max)", ""},
            {"mem/rank", "(MiB, max)", ""},
            {"balance", "(max/mean)", ""},
            {"time", "(ms)", ""},
            {"exposed comm", "(ms)", ""},
            {"GFLOP/s", "per rank", ""}};
  }
  std::string_view unit() const override { return "tokens"; }
  std::int64_t units() const override { return planned_->q_tokens(); }
  PlanRow row(int world, Route route, bool details, JsonWriter& json) override {
    Options options = request_.options;
    options.machine = planned_->machine(options.machine, (planned_->q_tokens() + world - 1) / world);
    const WorldPlanSummary summary = summarize_world_plan(planned_->ring(world), options, route, world);
    PlanRow row;
    if (details) {
      add_owners(summary, request_.verbose, row);
      for (std::string& line : planned_->world_lines(summary)) row.lines.push_back(std::move(line));
      add_blocks(summary, row);
    }
    write_row(json, *planned_, summary);
    row.cells = summary_cells(summary);
    return row;
  }

 private:
  PlanRequest request_;
  std::unique_ptr<PlannedRing> planned_;
};

class PlannedAttention final : public PlannedRing {
 public:
  PlannedAttention(const JobInput& input, const Options& options, KernelScope scope)
      : input_(input), job_(input, options, scope) {}

  const KernelEntry& kernel() const override { return *job_.kernel().row; }
  const std::string& kernel_reason() const override { return job_.kernel().reason; }
  const Backend& backend() const override { return job_.backend(); }
  MachineModel machine(const MachineModel& given, std::int64_t tokens) const override {
    return job_machine(given, *job_.kernel().row, job_.spec(), job_.backend(), tokens);
  }
  int key_tile() const override { return job_.key_tile(); }
  std::int64_t q_tokens() const override { return input_.job().batch.q_tokens(); }
  RingJob ring(int world) override { return job_.ring(world); }
  std::vector<std::string> lines() const override {
    std::string text = read_rows_text(input_);
    return text.empty() ? std::vector<std::string>{} : std::vector<std::string>{std::move(text)};
  }
  std::string length_text() const override {
    if (input_.mla() == nullptr) return {};
    return fmt::format("{} tokens, {}", input_.job().batch.k_tokens(), form_text(input_));
  }
  void write(JsonWriter& json, const WorldPlanSummary&) const override {
    if (input_.mla() != nullptr) json.member("form", form_name(input_.form().form));
  }

 private:
  const JobInput& input_;
  PlannedJob job_;
};

}  // namespace

std::unique_ptr<OpPlan> plan_ring(const PlanRequest& request, const MakePlannedRing& make) {
  return std::make_unique<RingPlan>(request, make);
}

std::unique_ptr<OpPlan> plan_ring(const JobInput& input, const PlanRequest& request) {
  const KernelScope scope = request.scope;
  return plan_ring(request, [&input, scope](const Options& options) {
    return std::make_unique<PlannedAttention>(input, options, scope);
  });
}

}  // namespace ringattn
