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
#include "launch/job_text.hpp"
#include "launch/plan_table.hpp"
#include "launch/report.hpp"
#include "launch/scan_request.hpp"

namespace ringattn {

namespace {

constexpr int kShownRanks = 8;  // without --verbose

// `machine`: what a run assumes, whatever --machine says of the link.
ScanForecast forecast_of(const ScanJob& job, const ScanKernel* kernel, const MachineModel& machine,
                         double convolution_rate, std::size_t budget, int world) {
  check_scan_budget(job, world, budget);
  ScanForecast forecast = forecast_scan(job, {}, world, kernel, machine, convolution_rate);
  check_budget(forecast.most_memory(), budget);
  return forecast;
}

// Who owns what: the ranks' runs, as sequence:first-last.
void print_owners(const Screen& screen, const ScanForecast& forecast, const ScanJob& job) {
  const Layout& layout = forecast.layout;
  const int world = layout.world();
  const int shown = screen.verbose() ? world : std::min(world, kShownRanks);
  for (int rank = 0; rank < shown; ++rank) {
    const std::int64_t states = states_received(forecast.hops, rank);
    screen.context(fmt::format("rank {} owns {} tokens, receives {}: {}", rank, layout.tokens(rank),
                               format_bytes(static_cast<double>(states * carried_bytes(job))),
                               runs_text(layout.runs(rank), screen.verbose())));
  }
  if (shown < world) {
    screen.context(fmt::format("… {} ranks in all; --verbose shows every one", world));
  }
}

std::vector<std::string> summary_row(const ScanJob& job, const ScanForecast& forecast, double passing) {
  const ScanMemory& memory = forecast.most_memory();
  return {fmt::format("{}", forecast.layout.world()),
          fmt::format("{}", job.tokens()),
          fmt::format("{}", forecast.layout.owners().size()),
          fmt::format("{}", forecast.states_moved()),
          mebibytes(static_cast<double>(carried_bytes(job))),
          mebibytes(static_cast<double>(memory.total())),
          fmt::format("{:.4f}", forecast.balance()),
          job.update ? "-" : fmt::format("{:.3f}", forecast.seconds * 1e3),
          fmt::format("{:.3f}", passing * 1e3)};
}

void write_row(JsonWriter& json, const ScanJob& job, const ScanForecast& forecast, double passing) {
  const std::int64_t state = carried_bytes(job);
  const int world = forecast.layout.world();
  json.begin_object().member("world", world).member("tokens", job.tokens());
  json.member("layout", layout_name(LayoutKind::kContiguous)).member("stripe", kSuperSegmentTokens);
  json.member("bytes_moved", forecast.states_moved() * state).member("state_bytes", state);
  json.member("memory_per_rank", forecast.most_memory().total());
  write_memory(json, forecast.most_memory());
  json.member("balance", forecast.balance());
  if (job.update) {
    json.key("predicted_ms").null();  // it waits for memory, whose speed kernels don't tell
  } else {
    json.member("predicted_ms", forecast.seconds * 1e3);
  }
  json.member("passing_ms", passing * 1e3);
  json.member("flops", scan_token_flops(job) * static_cast<double>(job.tokens()));
  json.key("ranks").begin_array();
  for (int rank = 0; rank < world; ++rank) {
    const std::int64_t tokens = forecast.layout.tokens(rank);
    json.begin_object().member("tokens", tokens);
    json.member("flops", scan_token_flops(job) * static_cast<double>(tokens));
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
  const MachineModel assumed = default_machine(*choice.row, *backend);
  const MachineModel given = machine_model(config);
  const MachineModel& machine = given == MachineModel{} ? assumed : given;
  const double convolution = convolution_rate(first, choice, *backend, planned_place(options));

  const std::string tool = version_line();
  screen.context(tool.substr(0, tool.size() - 1));
  screen.context(fmt::format("job: {}", inputs.size() == 1 ? describe(first)
                                        : first.alone      ? describe(*first.convolution)
                                                           : describe(first.spec)));
  print_unread(screen, inputs.front().unread());
  screen.context(fmt::format("kernel: {}", choice.reason));
  screen.context(
      fmt::format("rates: {:.4g} GFLOP/s a rank by the kernel{}; {:.4g} GB/s and latency {:.4g} us by machine {}",
                  assumed.flops_per_second / 1e9,
                  convolution > 0.0 ? fmt::format(", {:.4g} by the convolution's", convolution / 1e9) : "",
                  machine.link_bytes_per_second / 1e9, machine.latency_seconds * 1e6, machine.name));
  note_default_machine(screen, options);

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
        const ScanForecast forecast = forecast_of(input.job(), kernel.get(), assumed, convolution,
                                                  library.memory_budget, static_cast<int>(world));
        const double passing = passing_seconds(input.job(), forecast, machine);
        if (table.alone()) print_owners(screen, forecast, input.job());
        write_row(json, input.job(), forecast, passing);
        return summary_row(input.job(), forecast, passing);
      });
    }
  }
  table.finish();
  return 0;
}

}  // namespace ringattn
