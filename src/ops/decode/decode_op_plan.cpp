// SPDX-License-Identifier: Apache-2.0
// Plans of decode steps.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/json_writer.hpp"
#include "ops/attention/attention_op_job.hpp"
#include "ops/attention_jobs/input_cost.hpp"
#include "ops/decode/decode_plan_summary.hpp"

namespace ringattn {

namespace {

std::int64_t most(const std::vector<std::int64_t>& values) { return *std::max_element(values.begin(), values.end()); }

void add_ranks(const JobInput& input, const DecodePlanSummary& step, bool verbose, PlanRow& row) {
  row.lines.push_back(fmt::format("cache: {}; {}", cache_text(input, step.job), deal_text(step)));
  const std::size_t shown = verbose ? step.keys.size() : std::min(step.keys.size(), std::size_t{kShownRanks});
  for (std::size_t rank = 0; rank < shown; ++rank) row.lines.push_back(held_text(step, rank));
  row.ranks_left_out = static_cast<int>(step.keys.size() - shown);
}

std::vector<std::string> summary_cells(const JobInput& input, const DecodePlanSummary& step, std::int64_t world,
                                       std::optional<double> seconds) {
  const Batch& batch = input.job().batch;
  const DecodeMemory& memory = step.memory;
  return {fmt::format("{}", world),
          fmt::format("{}", batch.k_tokens()),
          fmt::format("{}", batch.sequences.size()),
          fmt::format("{}", batch.q_tokens()),
          input.pages() == nullptr ? "dense" : fmt::format("{}", input.pages()->page_size),
          mebibytes_text(static_cast<double>(memory.cache)),
          mebibytes_text(static_cast<double>(memory.scratch)),
          mebibytes_text(static_cast<double>(memory.partials)),
          mebibytes_text(static_cast<double>(memory.total())),
          fmt::format("{:.2f}", static_cast<double>(most(step.received)) / 0x1p20),
          fmt::format("{:.2f}", step.bytes_read / static_cast<double>(world) / 0x1p20),
          fmt::format("{:.4f}", step.balance()),
          seconds ? fmt::format("{:.3f}", *seconds * 1e3) : "-"};
}

void write_row(JsonWriter& json, const JobInput& input, const DecodePlanSummary& step, std::int64_t world,
               std::optional<double> seconds) {
  json.begin_object().member("world", world).member("tokens", input.job().batch.q_tokens());
  if (input.mla() != nullptr) json.member("form", form_name(input.form().form));
  json.member("keys", input.job().batch.k_tokens()).member("page_size", step.job.page_size);
  json.member("layout", deal_name(step.deal)).member("stripe", step.kv_split_keys).member("kv_splits", step.kv_splits);
  json.member("bytes_per_rank", most(step.received)).member("bytes_moved", step.bytes_moved());
  json.member("bytes_read", step.bytes_read).member("memory_per_rank", step.memory.total());
  write_memory(json, step.memory);
  json.member("balance", step.balance()).member("flops", job_flops(input));
  json.key("estimated_ms");
  if (seconds) {
    json.value(*seconds * 1e3);
  } else {
    json.null();
  }
  json.key("ranks").begin_array();
  for (std::size_t rank = 0; rank < step.keys.size(); ++rank) {
    json.begin_object().member("queries", step.rows[rank]).member("keys", step.keys[rank]);
    json.member("kv_heads", step.kv_heads[rank]).member("attended", step.attended[rank]);
    json.member("bytes", step.received[rank]).end_object();
  }
  json.end_array().end_object();
}

class DecodePlan final : public OpPlan {
 public:
  DecodePlan(const JobInput& input, PlanRequest request)
      : input_(input),
        request_(std::move(request)),
        choice_(choose_kernel(decode_spec(input_), request_.options.kernel, request_.scope)),
        backend_(choice_.row->make_backend({planned_threads(request_.options), kNoDevice})),
        key_tile_(choice_.row->make_kernel(stored_spec(input_, *choice_.row, 1), *backend_)->key_tile()) {}

  const KernelEntry& kernel() const override { return *choice_.row; }
  const Backend& backend() const override { return *backend_; }
  std::vector<std::string> lines() const override {
    std::vector<std::string> lines{fmt::format("kernel: {}; tiles of {} keys", choice_.reason, key_tile_)};
    const MachineModel& machine = request_.options.machine;
    if (estimates_time()) {
      lines.push_back(fmt::format("machine: {}; reads {:.4g} GB/s of memory a rank", machine.name,
                                  host_rates(machine, planned_threads(request_.options)).memory.all / 1e9));
    }
    return lines;
  }
  bool estimates_time() const override { return choice_.row->host_work != nullptr; }
  std::string length_text() const override {
    if (input_.mla() == nullptr) return {};
    return fmt::format("{} keys, {}", input_.job().batch.k_tokens(), form_text(input_));
  }
  std::vector<Cell> columns() const override {
    return {{"world", "", ""},
            {"keys", "", ""},
            {"seqs", "", ""},
            {"rows", "", ""},
            {"page", "", ""},
            {"cache", "(MiB/rank)", ""},
            {"scratch", "(MiB/rank)", ""},
            {"partials", "(MiB/rank)", ""},
            {"memory", "(MiB/rank)", ""},
            {"received", "(MiB, max)", ""},
            {"read", "(MiB/rank)", ""},
            {"balance", "(max/mean)", ""},
            {"time", "(ms)", ""}};
  }
  std::string_view unit() const override { return "keys"; }
  std::int64_t units() const override { return input_.job().batch.k_tokens(); }
  PlanRow row(int world, Route, bool details, JsonWriter& json) override {
    const Options& options = request_.options;
    const DecodePlanSummary step =
        summarize_decode_plan(input_, options.kernel, world, options.threads, request_.scope);
    check_budget(step.memory, options.memory_budget);
    PlanRow row;
    if (details) add_ranks(input_, step, request_.verbose, row);
    const std::optional<double> seconds = step_seconds(step);
    write_row(json, input_, step, world, seconds);
    row.cells = summary_cells(input_, step, world, seconds);
    return row;
  }

 private:
  // Estimated for the rank that attends to most keys. It reads them while it computes. A work tile is one KV split of
  // at least one head.
  std::optional<double> step_seconds(const DecodePlanSummary& step) const {
    if (!estimates_time()) return std::nullopt;
    const auto ranks = static_cast<double>(step.attended.size());
    const double share = step.balance() / ranks;
    const DecodeSpec spec = stored_spec(input_, *choice_.row, 1);
    HostWork work = choice_.row->host_work(spec, *backend_, step.job.limits.rows);
    const double keys = share * job_flops(input_) / work.flops;
    for (WorkPhase& phase : work.phases) {
      phase.tiles = share * static_cast<double>(step.job.limits.sequences * step.kv_splits * spec.attention.kv_heads);
      phase.vector_seconds *= keys;
      phase.amx_seconds *= keys;
      phase.bytes = share * step.bytes_read;
    }
    return host_seconds(work, host_rates(request_.options.machine, work.threads));
  }

  const JobInput& input_;
  PlanRequest request_;
  DecodeChoice choice_;
  std::unique_ptr<Backend> backend_;
  int key_tile_;
};

}  // namespace

std::unique_ptr<OpPlan> plan_decode(const JobInput& input, const PlanRequest& request) {
  return std::make_unique<DecodePlan>(input, request);
}

}  // namespace ringattn
