// SPDX-License-Identifier: Apache-2.0
#include "launch/plan_ssm.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "attention/tokens/cost.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "launch/help.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/plan_table.hpp"
#include "launch/report.hpp"
#include "launch/ssm_request.hpp"
#include "ops/ssm/ssm_op_job.hpp"
#include "ops/ssm/ssm_plan_summary.hpp"

namespace ringattn {

namespace {

constexpr int kShownRanks = 8;  // without --verbose

// `machine`: the model that a run of the job uses, also if --machine is given.
SsmPlanSummary summary_of(const SsmJob& job, const SsmKernel* kernel, const MachineModel& machine, double conv1d_rate,
                          std::size_t budget, int world) {
  check_ssm_budget(job, world, budget);
  SsmPlanSummary summary = summarize_ssm_plan(job, {}, world, kernel, machine, conv1d_rate);
  check_budget(summary.max_memory(), budget);
  return summary;
}

// Prints the runs of tokens that each rank owns, as sequence:begin-end.
void print_owners(const Screen& screen, const SsmPlanSummary& summary, const SsmJob& job) {
  const Layout& layout = summary.layout;
  const int world = layout.world();
  const int shown = screen.verbose() ? world : std::min(world, kShownRanks);
  for (int rank = 0; rank < shown; ++rank) {
    const std::int64_t states = states_received(summary.hops, rank);
    screen.context(fmt::format("rank {} owns {} tokens, receives {}: {}", rank, layout.tokens(rank),
                               format_bytes(static_cast<double>(states * carried_bytes(job))),
                               runs_text(layout.runs(rank), screen.verbose())));
  }
  if (shown < world) {
    screen.context(fmt::format("… {} ranks in all; --verbose shows every one", world));
  }
}

std::vector<std::string> summary_row(const SsmJob& job, const SsmPlanSummary& summary, double passing) {
  const SsmMemory& memory = summary.max_memory();
  return {fmt::format("{}", summary.layout.world()),
          fmt::format("{}", job.tokens()),
          fmt::format("{}", summary.layout.owners().size()),
          fmt::format("{}", summary.states_moved()),
          mebibytes(static_cast<double>(carried_bytes(job))),
          mebibytes(static_cast<double>(memory.total())),
          fmt::format("{:.4f}", summary.balance()),
          job.update ? "-" : fmt::format("{:.3f}", summary.seconds * 1e3),
          fmt::format("{:.3f}", passing * 1e3)};
}

void write_row(JsonWriter& json, const SsmJob& job, const SsmPlanSummary& summary, double passing) {
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

std::vector<SsmInput> inputs_of(const Config& config) {
  std::vector<SsmInput> inputs;
  if (config.given("input")) {
    inputs.push_back(open_ssm(config));
    return inputs;
  }
  for (const std::int64_t seq : config.options.seq) inputs.push_back(open_ssm(config, seq));
  return inputs;
}

}  // namespace

int plan_ssm(const Invocation& invocation, const Screen& screen) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const std::vector<SsmInput> inputs = inputs_of(config);
  const SsmJob& first = inputs.front().job();
  const SsmOptions library = ssm_options(library_options(config));
  const SsmJobChoice choice = choose_kernel(first, library.kernel, planned_scope(options));
  const std::unique_ptr<Backend> backend = choice.row->make_backend({1, kNoDevice});
  const std::unique_ptr<SsmKernel> kernel = choice.ssm ? choice.ssm->make_kernel(first.spec, *backend) : nullptr;
  const MachineModel assumed = default_machine(*choice.row, *backend);
  const MachineModel given = machine_model(config);
  const MachineModel& machine = given == MachineModel{} ? assumed : given;
  const double convolution = conv1d_rate(first, choice, *backend, planned_scope(options));

  const std::string tool = version_line();
  screen.context(tool.substr(0, tool.size() - 1));
  screen.context(fmt::format("job: {}", inputs.size() == 1  ? describe(first)
                                        : first.conv1d_only ? describe(*first.convolution)
                                                            : describe(first.spec)));
  print_unread(screen, inputs.front().unread());
  screen.context(fmt::format("kernel: {}", choice.reason));
  screen.context(fmt::format("rates: kernel {:.4g} GFLOP/s per rank{}; machine {}: {:.4g} GB/s, latency {:.4g} us",
                             assumed.flops_per_second / 1e9,
                             convolution > 0.0 ? fmt::format(", conv1d {:.4g}", convolution / 1e9) : "", machine.name,
                             machine.link_bytes_per_second / 1e9, machine.latency_seconds * 1e6));
  note_default_machine(screen, options);

  PlanTable table(invocation, screen, SsmOpJob(inputs.front()).shape(), op_name(inputs.front().op()), choice.row->name,
                  {{"world"},
                   {"tokens"},
                   {"runs"},
                   {first.conv1d_only ? "halos" : "states", "moved"},
                   {first.conv1d_only ? "halo" : "state", "(MiB)"},
                   {"mem/rank", "(MiB, max)"},
                   {"balance", "(max/mean)"},
                   {"time", "(ms)"},
                   {"passing", "(ms)"}},
                  inputs.size() * options.world.size(), "tokens");
  for (const SsmInput& input : inputs) {
    for (const std::int64_t world : options.world) {
      table.add(world, input.job().tokens(), [&](JsonWriter& json) {
        const SsmPlanSummary summary =
            summary_of(input.job(), kernel.get(), assumed, convolution, library.memory_budget, static_cast<int>(world));
        const double passing = passing_seconds(input.job(), summary, machine);
        if (table.alone()) print_owners(screen, summary, input.job());
        write_row(json, input.job(), summary, passing);
        return summary_row(input.job(), summary, passing);
      });
    }
  }
  table.finish();
  return 0;
}

}  // namespace ringattn
