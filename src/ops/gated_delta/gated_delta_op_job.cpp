// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_delta/gated_delta_op_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/tokens/ssm_layout.hpp"
#include "base/failpoint.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/common/digest.hpp"
#include "ops/jobs/model_comparison.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

InputShape GatedDeltaOpJob::shape() const {
  const GatedDeltaJob& job = input_.job();
  const GatedDeltaSpec& spec = job.spec;
  InputShape shape{{"op", std::string(op())},
                   {"dtype", std::string(dtype_name(spec.dtype))},
                   {"heads", fmt::format("{}", spec.value_heads)},
                   {"key-heads", fmt::format("{}", spec.key_heads)},
                   {"head-dim", fmt::format("{}", spec.key_dim)},
                   {"head-dim-v", fmt::format("{}", spec.value_dim)},
                   {"decay", spec.key_decays ? "dim" : "head"},
                   {"batch", fmt::format("{}", job.lengths.size())}};
  if (job.update) {
    shape.emplace("q-len", "1");
  } else if (!job.lengths.empty() && std::ranges::count(job.lengths, job.lengths.front()) == std::ssize(job.lengths)) {
    shape["seq"] = fmt::format("{}", job.lengths.front());
  }
  return shape;
}

void GatedDeltaOpJob::check_model(const ModelComparison& compare) const {
  const GatedDeltaSpec& spec = input_.job().spec;
  const ModelLayer& layer = compare.layer();
  if (layer.kind != LayerKind::kGatedDelta) compare.refuse_kind("a gated delta rule", layer_kind_name(layer.kind));
  if (layer.key_decays != spec.key_decays) {
    compare.refuse_kind(spec.key_decays ? "a decay for each key dim" : "a decay for each head",
                        layer.key_decays ? "a decay for each key dim" : "a decay for each head");
  }
  const int parts = compare.parts("the number of value heads", spec.value_heads, layer.heads);
  compare.shared("the number of key heads", spec.key_heads, layer.groups, parts);
  compare.same("the dim of keys", spec.key_dim, layer.head_dim);
  compare.same("the dim of values", spec.value_dim, layer.head_dim_v);
}

void GatedDeltaOpJob::write_job(JsonWriter& json) const {
  const GatedDeltaJob& job = input_.job();
  const GatedDeltaSpec& spec = job.spec;
  json.begin_object().member("dtype", dtype_name(spec.dtype)).member("key_heads", spec.key_heads);
  json.member("value_heads", spec.value_heads).member("key_dim", spec.key_dim).member("value_dim", spec.value_dim);
  json.member("decay", spec.key_decays ? "dim" : "head").member("qk_l2norm", spec.qk_l2norm);
  json.member("scale", static_cast<double>(scale_of(spec))).member("update", job.update);
  json.member("initial_states", job.initial_states).member("final_states", job.final_states);
  json.member("sequences", std::ssize(job.lengths)).member("tokens", job.tokens()).end_object();
}

void GatedDeltaOpJob::prepare(Transport& world, const Options& options) {
  collective_.emplace(world, Timeouts(options.timeout_seconds));
  rule_.emplace(input_.job(), world, ssm_options(options, timeline_));
}

PlanFigures GatedDeltaOpJob::plan(const Collective& collective) {
  PlanFigures figures;
  figures.blocks = std::ssize(rule_->layout().owners());
  figures.layout = layout_name(LayoutKind::kContiguous);
  figures.stripe = kSegmentTokens;
  for (const std::int64_t bytes : collective.gather_values(rule_->bytes_received())) figures.bytes_moved += bytes;
  figures.memory_per_rank = rule_->memory().total();
  // A decode step is memory-bound, and kernels report only how fast they compute.
  if (!input_.job().update) figures.estimated_seconds = rule_->estimated_seconds();
  return figures;
}

void GatedDeltaOpJob::write_plan(JsonWriter& json) { write_memory(json, rule_->memory()); }

std::vector<std::string> GatedDeltaOpJob::plan_lines(const PlanFigures& plan) {
  const auto states = static_cast<std::uint64_t>(plan.bytes_moved / state_bytes(input_.job().spec));
  const std::string sent = states == 0 ? ""
                                       : fmt::format("; {}, {} sent in order", counted(states, "state"),
                                                     format_bytes(static_cast<double>(plan.bytes_moved)));
  return {fmt::format("ranks: {} of whole segments{}, {} planned for a rank",
                      counted(static_cast<std::uint64_t>(plan.blocks), "run"), sent,
                      format_bytes(static_cast<double>(plan.memory_per_rank)))};
}

void GatedDeltaOpJob::release() {
  result_.reset();
  rule_.reset();
  collective_.reset();
}

RankFigures GatedDeltaOpJob::figures(const GatedDeltaResult& result) {
  RankFigures mine;
  mine.seconds = result.stats.seconds;
  mine.exposed_comm_seconds = result.stats.exposed_comm_seconds;
  mine.flops = gated_delta_token_flops(input_.job().spec) * static_cast<double>(result.rows);
  mine.memory_planned = rule_->memory().total();
  mine.tokens = result.rows;
  mine.bytes_received = rule_->bytes_received();
  mine.non_finite.q = result.non_finite;
  return mine;
}

RankFigures GatedDeltaOpJob::run(const ProgressCallback& on_progress) {
  LoadedGatedDelta loaded(input_, *rule_, *collective_, on_progress);
  const SsmStats stats = loaded.run();
  result_.emplace(loaded.fetch(stats));
  return figures(*result_);
}

std::vector<ResultDigest> GatedDeltaOpJob::digests_of(const GatedDeltaResult& result,
                                                      const Collective& collective) const {
  const GatedDeltaJob& job = input_.job();
  std::string states;
  if (job.final_states) {
    states = digest(collective, result.states_view(job.spec), result.sequences, std::ssize(job.lengths));
  }
  return {{"out", "out", digest(collective, result.o_view(job.spec), result.runs, job.tokens())},
          {"lse", "lse", ""},
          {"final_states", "final_states", std::move(states)}};
}

std::vector<ResultDigest> GatedDeltaOpJob::digests(const Collective& collective) {
  return digests_ = digests_of(*result_, collective);
}

RowGrid GatedDeltaOpJob::states_grid() const {
  const GatedDeltaSpec& spec = input_.job().spec;
  return {AxisOrder::kThd, 1, std::ssize(input_.job().lengths), spec.value_heads,
          std::int64_t{spec.key_dim} * spec.value_dim};
}

void GatedDeltaOpJob::write(const OutputRequest& output) {
  const GatedDeltaJob& job = input_.job();
  FileMetadata metadata = output_metadata(kernel(), identity_of(kernel(), backend()), {digests_.front().hex, {}});
  std::erase_if(metadata, [](const auto& entry) { return entry.first == "digest.lse"; });
  metadata.emplace_back("op", std::string(op()));
  metadata.emplace_back("job", ringattn::describe(job.spec));
  if (job.final_states) metadata.emplace_back("digest.final_states", digests_.back().hex);
  metadata.insert(metadata.end(), output.metadata.begin(), output.metadata.end());
  std::vector<OutputTensor> tensors{{"out", file_dtype(job.spec.dtype), input_.out_grid().shape()}};
  if (job.final_states) tensors.push_back({"final_states", FileDtype::kF32, input_.states_shape()});
  write_collectively(*collective_, tensors, metadata, output.path, output.replace, [&](SafetensorsWriter& writer) {
    writer.write_rows("out", input_.out_grid(), result_->runs, result_->o_view(job.spec));
    failpoint("writing");
    if (!job.final_states) return;
    writer.write_rows("final_states", states_grid(), result_->sequences, result_->states_view(job.spec));
  });
}

std::vector<Cell> GatedDeltaOpJob::columns(const Totals& totals) const {
  const GatedDeltaJob& job = input_.job();
  const auto tokens = static_cast<double>(job.tokens());
  const double rate = totals.seconds > 0.0 ? tokens / totals.seconds : 0.0;
  const auto bytes = static_cast<double>(gated_delta_token_bytes(job.spec));
  return {{"tokens", "", fmt::format("{}", job.tokens())},
          {"seqs", "", fmt::format("{}", job.lengths.size())},
          {"rule", "", job.spec.key_decays ? "KDA" : "GDN"},
          {"heads", "key/value", fmt::format("{}/{}", job.spec.key_heads, job.spec.value_heads)},
          {"dim", "key/value", fmt::format("{}/{}", job.spec.key_dim, job.spec.value_dim)},
          {"dtype", "", std::string(dtype_name(job.spec.dtype))},
          {"time", "(ms)", fmt::format("{:.3f}", totals.seconds * 1e3)},
          {"Mtokens/s", "", fmt::format("{:.3f}", rate * 1e-6)},
          {"GB/s", "all ranks", fmt::format("{:.2f}", rate * bytes * 1e-9)},
          {"exposed comm", "(ms)", fmt::format("{:.3f}", totals.exposed_comm_seconds * 1e3)},
          {"mem/rank", "(MiB)", fmt::format("{:.1f}", static_cast<double>(totals.memory_peak) / 0x1p20)},
          {"digest of out", "", totals.digests->front().hex}};
}

std::vector<std::string> GatedDeltaOpJob::result_lines(const std::vector<ResultDigest>& digests) const {
  const ResultDigest& states = digests.back();
  if (states.hex.empty()) return {};
  return {fmt::format("digest of {}: {}", states.title, states.hex)};
}

std::string GatedDeltaOpJob::non_finite_text(const NonFinite& total) const {
  return fmt::format("{} values of the rows", total.total());
}

void GatedDeltaOpJob::write_non_finite(JsonWriter& json, const NonFinite& total) const {
  json.begin_object().member("rows", total.q).end_object();
}

Golden GatedDeltaOpJob::golden() {
  const GatedDeltaJob& job = input_.job();
  std::string lengths;
  if (job.lengths.size() <= 8) {
    for (const std::int64_t length : job.lengths) lengths += fmt::format(" {}", length);
  }
  return golden_of(fmt::format("{}; {};{}", input_.seed() ? input_.source() : "a file", describe(), lengths),
                   kernel().name, identity_of(kernel(), backend()));
}

BenchJob GatedDeltaOpJob::bench_job(std::string source) const {
  const GatedDeltaJob& job = input_.job();
  const GatedDeltaSpec& spec = job.spec;
  BenchJob result{std::string(op()), BenchKind::kStream, job.tokens(), 0, std::ssize(job.lengths), {},
                  std::move(source)};
  if (result.batch > 0) result.seq = result.tokens / result.batch;
  std::string rule = spec.key_decays ? "KDA" : "GDN";
  if (spec.qk_l2norm) rule += ", qk norm";
  if (job.update) rule += ", update";
  result.members = {{"heads", spec.value_heads},
                    {"kv_heads", spec.key_heads},
                    {"head_dim", spec.key_dim},
                    {"head_dim_v", spec.value_dim},
                    {"dtype", std::string(dtype_name(spec.dtype))},
                    {"mask", rule}};
  return result;
}

Measured GatedDeltaOpJob::measure(const MeasureRequest& request, const Collective& collective) {
  LoadedGatedDelta loaded(input_, *rule_, collective, request.on_progress);
  SsmStats last;
  const Samples samples = sample_ssm(
      collective, {request.samples, request.on_progress}, [&] { return loaded.run(); }, last);
  const GatedDeltaResult result = loaded.fetch(last);
  const double bytes =
      static_cast<double>(input_.job().tokens()) * static_cast<double>(gated_delta_token_bytes(input_.job().spec));
  return {{{false, samples, bytes}}, figures(result), digests_of(result, collective).front().hex};
}

std::vector<TraceEvent> GatedDeltaOpJob::timeline() const {
  std::vector<TraceEvent> events;
  for (const SsmPhase& phase : result_->stats.parts) {
    events.push_back({static_cast<int>(phase.kind),
                      fmt::format("heads {} to {}", phase.heads.first, phase.heads.end() - 1), phase.begin, phase.end});
  }
  return events;
}

}  // namespace ringattn
