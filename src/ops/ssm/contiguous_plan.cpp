// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/contiguous_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/size.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

std::vector<std::int64_t> state_bytes_received(const StateHops& hops, int world, std::int64_t state_bytes) {
  std::vector<std::int64_t> received;
  for (int rank = 0; rank < world; ++rank) received.push_back(states_received(hops, rank) * state_bytes);
  return received;
}

void add_owners(const ContiguousPlan& plan, bool verbose, PlanRow& row) {
  const int world = plan.layout.world();
  const int shown = verbose ? world : std::min(world, kShownRanks);
  for (int rank = 0; rank < shown; ++rank) {
    row.lines.push_back(fmt::format("rank {} owns {} tokens, receives {}: {}", rank, plan.layout.tokens(rank),
                                    format_bytes(static_cast<double>(plan.received[static_cast<std::size_t>(rank)])),
                                    runs_text(plan.layout.runs(rank), verbose)));
  }
  row.ranks_left_out = world - shown;
}

void write_contiguous_plan(JsonWriter& json, const ContiguousPlan& plan) {
  const int world = plan.layout.world();
  json.begin_object().member("world", world).member("tokens", plan.tokens());
  json.member("layout", layout_name(LayoutKind::kContiguous)).member("stripe", plan.unit_tokens);
  json.member("bytes_moved", std::accumulate(plan.received.begin(), plan.received.end(), std::int64_t{0}));
  if (plan.state_bytes) json.member("state_bytes", *plan.state_bytes);
  json.member("memory_per_rank", plan.memory.total());
  write_memory(json, plan.memory);
  if (plan.balance) json.member("balance", *plan.balance);
  json.key("estimated_ms");
  if (plan.seconds) {
    json.value(*plan.seconds * 1e3);
  } else {
    json.null();
  }
  if (plan.passing_seconds) json.member("passing_ms", *plan.passing_seconds * 1e3);
  if (plan.reshard) plan.reshard->write(json);
  json.member("flops", plan.token_flops * static_cast<double>(plan.tokens()));
  json.key("ranks").begin_array();
  for (int rank = 0; rank < world; ++rank) {
    const std::int64_t tokens = plan.layout.tokens(rank);
    json.begin_object().member("tokens", tokens).member("flops", plan.token_flops * static_cast<double>(tokens));
    json.member("bytes", plan.received[static_cast<std::size_t>(rank)]).end_object();
  }
  json.end_array().end_object();
}

std::vector<Cell> state_plan_columns(const std::string& state) {
  return {{"world", "", ""},
          {"tokens", "", ""},
          {"runs", "", ""},
          {state + "s", "moved", ""},
          {state, "(MiB)", ""},
          {"mem/rank", "(MiB, max)", ""},
          {"balance", "(max/mean)", ""},
          {"time", "(ms)", ""},
          {"passing", "(ms)", ""}};
}

PlanRow state_plan_row(const ContiguousPlan& plan, std::int64_t states_moved, bool details, bool verbose) {
  PlanRow row;
  if (details) add_owners(plan, verbose, row);
  if (details && plan.reshard) row.notes.push_back(plan.reshard->text());
  row.cells = {fmt::format("{}", plan.layout.world()),
               fmt::format("{}", plan.tokens()),
               fmt::format("{}", plan.layout.owners().size()),
               fmt::format("{}", states_moved),
               mebibytes_text(static_cast<double>(*plan.state_bytes)),
               mebibytes_text(static_cast<double>(plan.memory.total())),
               fmt::format("{:.4f}", *plan.balance),
               plan.seconds ? fmt::format("{:.3f}", *plan.seconds * 1e3) : "-",
               fmt::format("{:.3f}", *plan.passing_seconds * 1e3)};
  return row;
}

}  // namespace ringattn
