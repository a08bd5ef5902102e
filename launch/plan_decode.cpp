// SPDX-License-Identifier: Apache-2.0
#include "launch/plan_decode.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "launch/help.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/plan_table.hpp"
#include "launch/report.hpp"
#include "ops/common/attention_op_job.hpp"
#include "ops/common/file_job.hpp"
#include "ops/common/input_cost.hpp"
#include "ops/decode/decode_plan_summary.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kShownRanks = 8;  // without --verbose

std::int64_t most(const std::vector<std::int64_t>& values) { return *std::max_element(values.begin(), values.end()); }

void print_ranks(const Screen& screen, const DecodePlanSummary& step) {
  const std::size_t shown = screen.verbose() ? step.keys.size() : std::min(step.keys.size(), kShownRanks);
  for (std::size_t rank = 0; rank < shown; ++rank) {
    screen.context(held_text(step, rank));
  }
  if (shown < step.keys.size()) {
    screen.context(fmt::format("… {} ranks in all; --verbose shows every one", step.keys.size()));
  }
}

std::vector<std::string> summary_row(const JobInput& input, const DecodePlanSummary& step, std::int64_t world) {
  const Batch& batch = input.job().batch;
  const DecodeMemory& memory = step.memory;
  return {fmt::format("{}", world),
          fmt::format("{}", batch.k_tokens()),
          fmt::format("{}", batch.sequences.size()),
          fmt::format("{}", batch.q_tokens()),
          input.pages() == nullptr ? "dense" : fmt::format("{}", input.pages()->page_size),
          mebibytes(static_cast<double>(memory.cache)),
          mebibytes(static_cast<double>(memory.scratch)),
          mebibytes(static_cast<double>(memory.partials)),
          mebibytes(static_cast<double>(memory.total())),
          fmt::format("{:.2f}", static_cast<double>(most(step.received)) / 0x1p20),
          fmt::format("{:.2f}", step.bytes_read / static_cast<double>(world) / 0x1p20),
          fmt::format("{:.4f}", step.balance())};
}

void write_row(JsonWriter& json, const JobInput& input, const DecodePlanSummary& step, std::int64_t world) {
  json.begin_object().member("world", world).member("tokens", input.job().batch.q_tokens());
  if (input.op() == Op::kMla) json.member("form", form_name(input.form().form));
  json.member("keys", input.job().batch.k_tokens()).member("page_size", step.job.page_size);
  json.member("layout", deal_name(step.deal)).member("stripe", step.kv_split_keys).member("kv_splits", step.kv_splits);
  json.member("bytes_per_rank", most(step.received)).member("bytes_moved", step.bytes_moved());
  json.member("bytes_read", step.bytes_read).member("memory_per_rank", step.memory.total());
  write_memory(json, step.memory);
  json.member("balance", step.balance()).member("flops", job_flops(input));
  json.key("ranks").begin_array();
  for (std::size_t rank = 0; rank < step.keys.size(); ++rank) {
    json.begin_object().member("queries", step.rows[rank]).member("keys", step.keys[rank]);
    json.member("kv_heads", step.kv_heads[rank]).member("attended", step.attended[rank]);
    json.member("bytes", step.received[rank]).end_object();
  }
  json.end_array().end_object();
}

}  // namespace

int plan_decode(const Invocation& invocation, const std::vector<JobInput>& inputs, const Screen& screen) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const Options library = library_options(config);
  const KernelScope scope = planned_scope(options);
  const JobInput& first = inputs.front();
  const auto choice = choose_kernel(decode_spec(first), library.kernel, scope);
  const std::unique_ptr<Backend> backend = choice.row->make_backend({1, kNoDevice});
  const int key_tile = choice.row->make_kernel(stored_spec(first, *choice.row, 1), *backend)->key_tile();

  const std::string tool = version_line();
  screen.context(tool.substr(0, tool.size() - 1));
  screen.context(fmt::format("job: decode, {}", inputs.size() == 1 ? describe(first) : shape_text(first)));
  print_unread(screen, first.unread());
  note_model_sinks(screen, invocation.config);
  screen.context(fmt::format("kernel: {}; tiles of {} keys", choice.reason, key_tile));

  PlanTable table(invocation, screen, AttentionOpJob(first).shape(), op_name(first.op()), choice.row->name,
                  {{"world"},
                   {"keys"},
                   {"seqs"},
                   {"rows"},
                   {"page"},
                   {"cache", "(MiB/rank)"},
                   {"scratch", "(MiB/rank)"},
                   {"partials", "(MiB/rank)"},
                   {"memory", "(MiB/rank)"},
                   {"received", "(MiB, max)"},
                   {"read", "(MiB/rank)"},
                   {"balance", "(max/mean)"}},
                  inputs.size() * options.world.size(), "keys");
  for (const JobInput& input : inputs) {
    if (input.op() == Op::kMla) {
      screen.context(fmt::format("{} keys, {}", input.job().batch.k_tokens(), form_text(input)));
    }
    for (const std::int64_t world : options.world) {
      table.add(world, input.job().batch.k_tokens(), [&](JsonWriter& json) {
        const DecodePlanSummary step =
            summarize_decode_plan(input, library.kernel, static_cast<int>(world), library.threads, scope);
        check_budget(step.memory, library.memory_budget);
        if (table.alone()) {
          screen.context(fmt::format("cache: {}; {}", cache_text(input, step.job), deal_text(step)));
          print_ranks(screen, step);
        }
        write_row(json, input, step, world);
        return summary_row(input, step, world);
      });
    }
  }
  table.finish();
  return 0;
}

}  // namespace ringattn
