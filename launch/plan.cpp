// SPDX-License-Identifier: Apache-2.0
// `ringattn plan`: what a run would do, computed only from the job's shape.
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "comm/world.hpp"
#include "launch/commands.hpp"
#include "launch/help.hpp"
#include "launch/input_warnings.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/plan_decode.hpp"
#include "launch/plan_ssm.hpp"
#include "launch/plan_table.hpp"
#include "launch/screen.hpp"
#include "launch/ssm_request.hpp"
#include "launch/table.hpp"
#include "launch/values.hpp"
#include "ops/attention/world_plan_summary.hpp"
#include "ops/common/attention_op_job.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/planned_job.hpp"
#include "ops/decode/decode_or_attend.hpp"

namespace ringattn {

namespace {

constexpr int kShownRanks = 8;  // without --verbose

// Who owns what: the ranks' query runs, as sequence:first-last.
void print_owners(const Screen& screen, const WorldPlanSummary& summary) {
  const Layout& queries = summary.layout.queries;
  const int shown = screen.verbose() ? summary.world() : std::min(summary.world(), kShownRanks);
  for (int rank = 0; rank < shown; ++rank) {
    screen.context(fmt::format("rank {} owns {} queries, {} keys: {}", rank, queries.tokens(rank),
                               summary.layout.keys.tokens(rank), runs_text(queries.runs(rank), screen.verbose())));
  }
  if (shown < summary.world()) {
    screen.context(fmt::format("… {} ranks in all; --verbose shows every one", summary.world()));
  }
}

void print_blocks(const Screen& screen, const WorldPlanSummary& summary) {
  Table table({{"block"},
               {"first key"},
               {"last key"},
               {"bytes/rank", "(MiB, max)"},
               {"work/rank", "(GFLOP, max)"},
               {"balance", "(max/mean)"}});
  for (std::size_t b = 0; b < summary.blocks.size(); ++b) {
    const BlockPlanSummary& block = summary.blocks[b];
    table.add({fmt::format("{}", b), fmt::format("{}", block.first_token), fmt::format("{}", block.last_token),
               mebibytes(static_cast<double>(block.max_bytes_received)), fmt::format("{:.4g}", block.max_flops / 1e9),
               fmt::format("{:.4f}", block.balance(summary.world()))});
  }
  screen.print(table.text());
}

Table::Column const kSummary[] = {{"world"},
                                  {"tokens"},
                                  {"stripe"},
                                  {"blocks"},
                                  {"bytes/rank", "(MiB, max)"},
                                  {"mem/rank", "(MiB, max)"},
                                  {"balance", "(max/mean)"},
                                  {"time", "(ms)"},
                                  {"exposed comm", "(ms)"},
                                  {"GFLOP/s", "per rank"}};

std::vector<std::string> summary_row(const WorldPlanSummary& summary) {
  const std::int64_t stripe = summary.layout.request.stripe;
  return {fmt::format("{}", summary.world()),
          fmt::format("{}", summary.q_tokens),
          stripe > 0 ? fmt::format("{}", stripe) : "varies",
          fmt::format("{}", summary.blocks.size()),
          mebibytes(static_cast<double>(summary.max_bytes_received)),
          mebibytes(static_cast<double>(summary.max_memory)),
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

// What a run of the same flags would refuse.
void check_as_run(const Config& config, const Backend& backend) {
  const JobOptions& options = config.options;
  const std::int64_t most = *std::max_element(options.world.begin(), options.world.end());
  if (options.transport == "self" && most > 1) {
    fail(ErrorCode::kUsage, fmt::format("{} self contradicts --world {}", config.origin("transport"), most),
         "it is a world of one rank", "Leave it out.");
  }
  if (options.checksum) check_checksum(backend);
}

// How blocks will be sent: as the named transport lets them or, for auto, as the one that joins processes does.
Route planned_route(const Config& config, const KernelEntry& kernel) {
  const std::string_view backend = kernel.backend;
  const std::string_view memory = backend == "cpu" ? "host" : "device";
  const std::string& name = config.options.transport;
  const auto rows = transport_table();
  if (name == "auto" && backend == "cpu") return Route::kChain;  // mpi's, whether this build has it or not
  if (name == "auto") return Route::kDirect;                     // p2p's and nccl's
  std::vector<std::string_view> names{"auto"};
  for (const TransportRow& row : rows) {
    names.push_back(row.name);
    if (row.name != name) continue;
    if (row.memory == memory || row.memory == "any") return row.route;
    fail(ErrorCode::kUsage, fmt::format("{} {} contradicts kernel {}", config.origin("transport"), name, kernel.name),
         fmt::format("one moves {} memory, the other works in {} memory", row.memory, memory),
         "Choose both with --backend and --transport.");
  }
  const std::string nearest = nearest_name(name, names.data(), names.size());
  fail(ErrorCode::kUsage, fmt::format("{} is \"{}\"", config.origin("transport"), name),
       fmt::format("this build has {}", join_choices(names)),
       nearest.empty() ? "Leave it out, or see `ringattn info`." : fmt::format("Did you mean \"{}\"?", nearest));
}

// The job of each length, or of the file. Jobs over latents in rows are decode steps only if all lengths are, because
// one table can't show both.
std::vector<JobInput> planned_inputs(const Config& config) {
  const KernelRequest request{config.options.backend, config.options.kernel};
  const auto settled = [&](JobInput input) {
    return decode_or_attend(std::move(input), request, planned_scope(config.options));
  };
  if (config.given("input")) return {settled(open_input(config, true))};
  std::vector<JobInput> inputs;
  for (const std::int64_t seq : config.options.seq) {
    JobInput input = decode_or_requested_rows({synthetic_input(config, seq), numerics_of(config)}, config);
    inputs.push_back(input.makes_cache() ? settled(std::move(input)) : std::move(input));
  }
  if (!std::ranges::all_of(inputs, &JobInput::decodes)) {
    for (JobInput& input : inputs) {
      if (input.makes_cache()) input = input.attended("another length makes no decode step");
    }
  }
  return inputs;
}

int plan_job(const Invocation& invocation) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const Screen screen(options, true);
  invocation.report_file->check();

  const OpenedSource source = open_source(config, false);
  if (source.ssm) return plan_ssm(invocation, screen);
  const std::vector<JobInput> inputs = planned_inputs(config);
  warn_of_unseen_keys(config, inputs.front());
  if (inputs.front().decodes()) return plan_decode(invocation, inputs, screen);
  Options library = library_options(config);
  const KernelScope scope = planned_scope(options);
  std::optional<PlannedJob> planned(std::in_place, inputs.front(), library, scope);
  const KernelEntry& row = *planned->kernel().row;
  if (library.machine == MachineModel{}) library.machine = default_machine(row, planned->backend());

  check_as_run(config, planned->backend());
  const Route route = planned_route(config, row);
  const std::string tool = version_line();
  screen.context(tool.substr(0, tool.size() - 1));
  const JobInput& one = inputs.front();
  screen.context(fmt::format("job: {}", inputs.size() == 1 ? describe(one) : shape_text(one)));
  print_unread(screen, one.unread());
  note_model_sinks(screen, config);
  screen.context(fmt::format("kernel: {}; tiles of {} keys", planned->kernel().reason, planned->key_tile()));
  if (const std::string text = read_rows_text(one); !text.empty()) screen.context(text);
  screen.context(fmt::format("machine: {}; {:.4g} GFLOP/s and {:.4g} GB/s a rank, latency {:.4g} us",
                             library.machine.name, library.machine.flops_per_second / 1e9,
                             library.machine.link_bytes_per_second / 1e9, library.machine.latency_seconds * 1e6));
  note_default_machine(screen, options);

  PlanTable table(invocation, screen, AttentionOpJob(one).shape(), op_name(one.op()), row.name,
                  {std::begin(kSummary), std::end(kSummary)}, inputs.size() * options.world.size(), "tokens");
  for (const JobInput& input : inputs) {
    planned.emplace(input, library, scope);
    if (input.op() == Op::kMla) {
      screen.context(fmt::format("{} tokens, {}", input.job().batch.k_tokens(), form_text(input)));
    }
    for (const std::int64_t world : options.world) {
      table.add(world, input.job().batch.q_tokens(), [&](JsonWriter& json) {
        const WorldPlanSummary summary =
            summarize_world_plan(planned->ring(static_cast<int>(world)), library, route, static_cast<int>(world));
        if (table.alone()) {
          screen.context(fmt::format("layout: {}", layout_text(summary.layout.request)));
          print_owners(screen, summary);
          if (!options.quiet) print_blocks(screen, summary);
        }
        write_row(json, input, summary);
        return summary_row(summary);
      });
    }
  }
  table.finish();
  return 0;
}

}  // namespace

int plan_main(const Invocation& invocation, Transport*) { return plan_job(invocation); }

}  // namespace ringattn
