// SPDX-License-Identifier: Apache-2.0
#include "launch/plan_scan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "attention/scan_forecast.hpp"
#include "attention/tokens/cost.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "launch/file_shape.hpp"
#include "launch/help.hpp"
#include "launch/job_request.hpp"
#include "launch/plan_table.hpp"
#include "launch/report.hpp"
#include "launch/scan_request.hpp"

namespace ringattn {

namespace {

constexpr int kShownRanks = 8;  // without --verbose

struct WorldFigures {
  int world = 1;
  ScanForecast forecast;
  std::int64_t states = 0;         // that travel
  double passing_seconds = 0.0;    // from the first rank to the last, half of the heads at a time
  std::vector<double> rank_flops;  // [ranks]

  double balance() const {
    double sum = 0.0;
    for (const double flops : rank_flops) sum += flops;
    return sum > 0.0 ? *std::ranges::max_element(rank_flops) / sum * world : 1.0;
  }
};

void check_budget(const ScanMemory& needed, std::size_t budget) {
  if (budget == 0 || needed.total() <= budget) return;
  fail(ErrorCode::kMemory, {setting("memory", static_cast<std::int64_t>(budget)), " is too small"},
       fmt::format("{} bytes are needed, {} of them of rows", needed.total(), needed.rows),
       "Use more ranks, or allow for fewer tokens.");
}

WorldFigures plan_world(const ScanJob& job, const ScanKernel* kernel, double flops_per_second,
                        const MachineModel& machine, std::size_t budget, int world) {
  check_scan_budget(job, world, budget);
  WorldFigures figures{world, forecast_scan(job, {}, world, kernel, flops_per_second), 0, 0.0, {}};
  check_budget(figures.forecast.most_memory(), budget);
  for (const std::vector<StateHop>& step : figures.forecast.hops.hops) {
    figures.states += static_cast<std::int64_t>(step.size());
    figures.passing_seconds +=
        machine.latency_seconds + 0.5 * static_cast<double>(carried_bytes(job)) / machine.link_bytes_per_second;
  }
  for (int rank = 0; rank < world; ++rank) {
    figures.rank_flops.push_back(scan_token_flops(job) * static_cast<double>(figures.forecast.layout.tokens(rank)));
  }
  return figures;
}

// Who owns what: the ranks' runs, as sequence:first-last.
void print_owners(const Screen& screen, const WorldFigures& figures, const ScanJob& job) {
  const Layout& layout = figures.forecast.layout;
  const int shown = screen.verbose() ? figures.world : std::min(figures.world, kShownRanks);
  for (int rank = 0; rank < shown; ++rank) {
    const std::int64_t states = states_received(figures.forecast.hops, rank);
    screen.context(fmt::format("rank {} owns {} tokens, receives {}: {}", rank, layout.tokens(rank),
                               format_bytes(static_cast<double>(states * carried_bytes(job))),
                               runs_text(layout.runs(rank), screen.verbose())));
  }
  if (shown < figures.world) {
    screen.context(fmt::format("… {} ranks in all; --verbose shows every one", figures.world));
  }
}

std::vector<std::string> summary_row(const ScanJob& job, const WorldFigures& figures) {
  const ScanMemory& memory = figures.forecast.most_memory();
  return {fmt::format("{}", figures.world),
          fmt::format("{}", job.tokens()),
          fmt::format("{}", figures.forecast.layout.owners().size()),
          fmt::format("{}", figures.states),
          mebibytes(static_cast<double>(carried_bytes(job))),
          mebibytes(static_cast<double>(memory.total())),
          fmt::format("{:.4f}", figures.balance()),
          job.update ? "-" : fmt::format("{:.3f}", figures.forecast.seconds * 1e3),
          fmt::format("{:.3f}", figures.passing_seconds * 1e3)};
}

void write_row(JsonWriter& json, const ScanJob& job, const WorldFigures& figures) {
  const ScanForecast& forecast = figures.forecast;
  const std::int64_t state = carried_bytes(job);
  json.begin_object().member("world", figures.world).member("tokens", job.tokens());
  json.member("layout", layout_name(LayoutKind::kContiguous)).member("stripe", kSuperSegmentTokens);
  json.member("bytes_moved", figures.states * state).member("state_bytes", state);
  json.member("memory_per_rank", forecast.most_memory().total());
  write_memory(json, forecast.most_memory());
  json.member("balance", figures.balance());
  if (job.update) {
    json.key("predicted_ms").null();  // it waits for memory, whose speed kernels don't tell
  } else {
    json.member("predicted_ms", forecast.seconds * 1e3);
  }
  json.member("passing_ms", figures.passing_seconds * 1e3);
  json.member("flops", scan_token_flops(job) * static_cast<double>(job.tokens()));
  json.key("ranks").begin_array();
  for (int rank = 0; rank < figures.world; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    json.begin_object().member("tokens", forecast.layout.tokens(rank)).member("flops", figures.rank_flops[r]);
    json.member("bytes", states_received(forecast.hops, rank) * state).end_object();
  }
  json.end_array().end_object();
}

std::vector<ScanInput> inputs_of(const Config& config) {
  std::vector<ScanInput> inputs;
  if (config.given("input")) {
    inputs.push_back(open_scan(config));
    return inputs;
  }
  for (const std::int64_t seq : config.options.seq) inputs.push_back(open_scan(config, seq));
  return inputs;
}

}  // namespace

int plan_scan(const Invocation& invocation, const Screen& screen) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const std::vector<ScanInput> inputs = inputs_of(config);
  const ScanJob& first = inputs.front().job();
  const ScanOptions library = scan_options(config);
  const ScanJobChoice choice = choose_kernel(first, library.kernel, planned_place(options));
  const std::unique_ptr<Backend> backend = choice.row->make_backend({1, kNoDevice});
  const std::unique_ptr<ScanKernel> kernel = choice.scan ? choice.scan->make_kernel(first.spec, *backend) : nullptr;
  const double flops_per_second = choice.row->flops_per_second(*backend);
  const MachineModel machine = machine_model(config);

  const std::string tool = version_line();
  screen.context(tool.substr(0, tool.size() - 1));
  screen.context(fmt::format("job: {}", inputs.size() == 1 ? describe(first)
                                        : first.alone      ? describe(*first.convolution)
                                                           : describe(first.spec)));
  screen.context(fmt::format("kernel: {}", choice.reason));
  screen.context(fmt::format(
      "rates: {:.4g} GFLOP/s a rank by the kernel; {:.4g} GB/s and latency {:.4g} us by machine {}",
      flops_per_second / 1e9, machine.link_bytes_per_second / 1e9, machine.latency_seconds * 1e6, machine.name));

  PlanTable table(invocation, screen, file_shape(first), op_name(inputs.front().op()), choice.row->name,
                  {{"world"},
                   {"tokens"},
                   {"runs"},
                   {first.alone ? "halos" : "states", "moved"},
                   {first.alone ? "halo" : "state", "(MiB)"},
                   {"mem/rank", "(MiB, most)"},
                   {"balance", "(max/mean)"},
                   {"time", "(ms)"},
                   {"passing", "(ms)"}},
                  inputs.size() * options.world.size(), "tokens");
  for (const ScanInput& input : inputs) {
    for (const std::int64_t world : options.world) {
      table.add(world, input.job().tokens(), [&](JsonWriter& json) {
        const WorldFigures figures = plan_world(input.job(), kernel.get(), flops_per_second, machine,
                                                library.memory_budget, static_cast<int>(world));
        if (table.alone()) print_owners(screen, figures, input.job());
        write_row(json, input.job(), figures);
        return summary_row(input.job(), figures);
      });
    }
  }
  table.finish();
  return 0;
}

}  // namespace ringattn
