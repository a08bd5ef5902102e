// SPDX-License-Identifier: Apache-2.0
// Plans of attention and MLA around the ring.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/json_writer.hpp"
#include "ops/attention/world_plan_summary.hpp"
#include "ops/common/attention_op_job.hpp"
#include "ops/common/planned_job.hpp"

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

void write_row(JsonWriter& json, const JobInput& input, const WorldPlanSummary& summary) {
  json.begin_object().member("world", summary.world()).member("tokens", summary.q_tokens);
  if (input.op() == Op::kMla) json.member("form", form_name(input.form().form));
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
  RingPlan(const JobInput& input, PlanRequest request)
      : input_(input), request_(std::move(request)), planned_(std::in_place, input_, request_.options, request_.scope) {
    if (request_.options.machine == MachineModel{}) {
      request_.options.machine = default_machine(kernel(), planned_->backend());
    }
    planned_.emplace(input_, request_.options, request_.scope);
  }

  const KernelEntry& kernel() const override { return *planned_->kernel().row; }
  const Backend& backend() const override { return planned_->backend(); }
  std::vector<std::string> lines() const override {
    std::vector<std::string> lines{
        fmt::format("kernel: {}; tiles of {} keys", planned_->kernel().reason, planned_->key_tile())};
    if (std::string text = read_rows_text(input_); !text.empty()) lines.push_back(std::move(text));
    const MachineModel& machine = request_.options.machine;
    lines.push_back(fmt::format("machine: {}; {:.4g} GFLOP/s and {:.4g} GB/s a rank, latency {:.4g} us", machine.name,
                                machine.flops_per_second / 1e9, machine.link_bytes_per_second / 1e9,
                                machine.latency_seconds * 1e6));
    return lines;
  }
  bool estimates_time() const override { return true; }
  std::string length_text() const override {
    if (input_.op() != Op::kMla) return {};
    return fmt::format("{} tokens, {}", input_.job().batch.k_tokens(), form_text(input_));
  }
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
  std::int64_t units() const override { return input_.job().batch.q_tokens(); }
  PlanRow row(int world, Route route, bool details, JsonWriter& json) override {
    const WorldPlanSummary summary = summarize_world_plan(planned_->ring(world), request_.options, route, world);
    PlanRow row;
    if (details) {
      add_owners(summary, request_.verbose, row);
      add_blocks(summary, row);
    }
    write_row(json, input_, summary);
    row.cells = summary_cells(summary);
    return row;
  }

 private:
  const JobInput& input_;
  PlanRequest request_;
  std::optional<PlannedJob> planned_;
};

}  // namespace

std::unique_ptr<OpPlan> plan_ring(const JobInput& input, const PlanRequest& request) {
  return std::make_unique<RingPlan>(input, request);
}

}  // namespace ringattn
