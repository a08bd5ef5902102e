// SPDX-License-Identifier: Apache-2.0
#include "ops/jobs/ring_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/json_writer.hpp"
#include "base/size.hpp"

namespace ringattn {

namespace {

bool all_equal(const std::vector<std::int64_t>& lengths) {
  return std::ranges::all_of(lengths, [&](std::int64_t length) { return length == lengths.front(); });
}

std::string dims_text(const AttentionSpec& spec) {
  return spec.head_dim_v == spec.head_dim ? fmt::format("{}", spec.head_dim)
                                          : fmt::format("{}/{}", spec.head_dim, spec.head_dim_v);
}

// One word, for a table column.
std::string mask_text(const AttentionSpec& spec) {
  std::string mask = describe(spec.mask);
  std::replace(mask.begin(), mask.end(), ' ', ':');
  return mask;
}

}  // namespace

InputShape attention_shape(std::string_view op, const Job& job) {
  const AttentionSpec& spec = job.spec;
  InputShape shape;
  const auto add = [&](std::string_view setting, auto value) {
    shape[std::string(setting)] = fmt::format("{}", value);
  };
  add("op", op);
  add("dtype", dtype_name(spec.dtype));
  add("heads", spec.heads);
  add("head-dim", spec.head_dim);
  add("head-dim-v", spec.head_dim_v);
  add("kv-heads", spec.kv_heads);
  const std::vector<std::int64_t> q = job.batch.q_lengths();
  const std::vector<std::int64_t> k = job.batch.k_lengths();
  add("batch", k.size());
  if (!k.empty() && all_equal(k)) add("seq", k.front());
  if (!q.empty() && all_equal(q)) add("q-len", q.front());
  return shape;
}

void write_attention_spec(JsonWriter& json, const AttentionSpec& spec) {
  json.member("dtype", dtype_name(spec.dtype)).member("heads", spec.heads);
  json.member("kv_heads", spec.kv_heads).member("head_dim", spec.head_dim).member("head_dim_v", spec.head_dim_v);
  json.member("mask", describe(spec.mask)).member("softmax_scale", static_cast<double>(spec.softmax_scale));
  json.member("softcap", static_cast<double>(spec.softcap)).member("sinks", spec.sinks);
}

void write_attention_tokens(JsonWriter& json, const Batch& batch) {
  json.member("sequences", static_cast<std::int64_t>(batch.sequences.size()));
  json.member("q_tokens", batch.q_tokens()).member("k_tokens", batch.k_tokens());
}

std::vector<Cell> spec_cells(const AttentionSpec& spec) {
  return {{"heads", "", fmt::format("{}", spec.heads)},
          {"kv", "", fmt::format("{}", spec.kv_heads)},
          {"dim", "", dims_text(spec)},
          {"dtype", "", std::string(dtype_name(spec.dtype))},
          {"mask", "", mask_text(spec)}};
}

std::vector<std::pair<std::string, BenchValue>> bench_members(const AttentionSpec& spec, const std::string& mask_more) {
  std::string mask = describe(spec.mask);
  if (spec.softcap > 0.0F) mask += fmt::format(", softcap {}", spec.softcap);
  if (spec.sinks) mask += ", sinks";
  return {{"heads", spec.heads},
          {"kv_heads", spec.kv_heads},
          {"head_dim", spec.head_dim},
          {"head_dim_v", spec.head_dim_v},
          {"dtype", std::string(dtype_name(spec.dtype))},
          {"mask", mask + mask_more}};
}

std::string layout_text(const LayoutRequest& request) {
  std::string text(layout_name(request.kind));
  if (request.stripe > 0) text += fmt::format(", stripe {} tokens", request.stripe);
  return text;
}

std::string sent_text(const PlanFigures& plan) {
  return plan.bytes_moved == 0 ? "" : fmt::format(", {} sent", format_bytes(static_cast<double>(plan.bytes_moved)));
}

std::string plan_text(const LayoutRequest& request, const PlanFigures& plan) {
  return fmt::format("layout: {}; {} block{}{}, {} planned for a rank", layout_text(request), plan.blocks,
                     plan.blocks == 1 ? "" : "s", sent_text(plan),
                     format_bytes(static_cast<double>(plan.memory_per_rank)));
}

PlanFigures plan_figures(const Collective& collective, const Plan& plan, const JobLayout& layout,
                         const TimeEstimate& estimate) {
  PlanFigures figures;
  figures.blocks = static_cast<std::int64_t>(plan.blocks.size());
  figures.layout = layout_name(layout.request.kind);
  figures.stripe = layout.request.stripe;
  figures.estimated_seconds = 0.0;
  struct Mine {
    std::int64_t bytes_received;
    std::size_t memory;
    double seconds;
  };
  for (const Mine& theirs :
       collective.gather_values(Mine{plan.bytes_received(), plan.memory_bytes, estimate.seconds})) {
    figures.bytes_moved += theirs.bytes_received;
    figures.memory_per_rank = std::max(figures.memory_per_rank, theirs.memory);
    figures.estimated_seconds = std::max(*figures.estimated_seconds, theirs.seconds);
  }
  return figures;
}

std::vector<std::string> block_lines(const Plan& plan) {
  std::vector<std::string> lines;
  for (std::size_t index = 0; index < plan.blocks.size(); ++index) {
    const BlockPlan& block = plan.blocks[index];
    lines.push_back(fmt::format("block {}: keys {} to {}; rank 0 receives {}, computes {:.3f} GFLOP", index,
                                block.first_token, block.last_token,
                                format_bytes(static_cast<double>(plan.block_bytes_received(index))),
                                plan.block_flops(index) / 1e9));
  }
  return lines;
}

std::vector<Measurement> measure_runs(const Collective& collective, const MeasureRequest& request,
                                      const std::function<RunStats(RunMode)>& run) {
  std::vector<RunMode> modes{request.compute_only ? RunMode::kComputeOnly : RunMode::kWhole};
  if (request.also_compute) modes.push_back(RunMode::kComputeOnly);
  const std::vector<Samples> samples = sample_runs(collective, {request.samples, request.on_progress}, run, modes);
  std::vector<Measurement> measured;
  for (std::size_t mode = 0; mode < modes.size(); ++mode) {
    measured.push_back({modes[mode] == RunMode::kComputeOnly, samples[mode], 0.0});
  }
  return measured;
}

RankFigures run_figures(const Plan& plan, const RunStats& stats) {
  RankFigures mine;
  mine.seconds = stats.seconds;
  mine.exposed_comm_seconds = stats.exposed_comm_seconds;
  mine.flops = plan.flops();
  mine.memory_planned = plan.memory_bytes;
  mine.bytes_received = plan.bytes_received();
  mine.bytes_sent = plan.bytes_sent();
  return mine;
}

std::vector<TraceEvent> block_events(const std::vector<BlockTimes>& blocks) {
  std::vector<TraceEvent> events;
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    const BlockTimes& times = blocks[block];
    const std::string name = fmt::format("block {}", block);
    events.push_back({0, name, times.compute_begin, times.compute_end});
    events.push_back({1, name, times.wait_begin, times.compute_begin});
    events.push_back({2, name, times.posted, times.compute_begin});
  }
  return events;
}

std::vector<Cell> ring_cells(const Job& job, const OpJob::Totals& totals, std::string_view tensor) {
  const bool tera = totals.flops_per_second_per_rank >= 1e12;
  const double exposed = totals.seconds > 0.0 ? 100.0 * totals.exposed_comm_seconds / totals.seconds : 0.0;
  std::vector<Cell> cells{{"tokens", "", fmt::format("{}", job.batch.q_tokens())},
                          {"seqs", "", fmt::format("{}", job.batch.sequences.size())}};
  std::ranges::move(spec_cells(job.spec), std::back_inserter(cells));
  cells.insert(cells.end(),
               {{"time", "(ms)", fmt::format("{:.3f}", totals.seconds * 1e3)},
                {tera ? "TFLOP/s" : "GFLOP/s", "per rank",
                 fmt::format("{:.1f}", totals.flops_per_second_per_rank / (tera ? 1e12 : 1e9))},
                {"exposed comm", "(%)", fmt::format("{:.1f}", exposed)},
                {"mem/rank", "(MiB)", fmt::format("{:.1f}", static_cast<double>(totals.memory_peak) / 0x1p20)},
                {fmt::format("digest of {}", tensor), "", totals.digests->front().hex}});
  return cells;
}

}  // namespace ringattn
