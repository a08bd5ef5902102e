// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/attention_op_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/attention_jobs/input_cost.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/decode/replay.hpp"
#include "ops/jobs/ring_report.hpp"

namespace ringattn {

namespace {

std::string mebibytes(std::size_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / 0x1p20); }

}  // namespace

std::string form_text(const JobInput& input) {
  return fmt::format("form: {} ({})", form_name(input.form().form), input.form().reason);
}

std::string read_rows_text(const JobInput& input) {
  if (!input.not_decoded_reason().empty()) {
    const bool cached = input.mla() == nullptr || input.pages() != nullptr;
    return (cached ? "cache: read into rows; " : "op: mla, ring attention; ") + input.not_decoded_reason();
  }
  if (input.pages() == nullptr) return {};
  if (input.mla() != nullptr) return "cache: read into rows";
  return "cache: read into rows; sequences of many queries, or of unequally many, are not decoded";
}

std::string cache_text(const JobInput& input, const DecodeJob& job) {
  const CacheFormat& given = input.job().format;
  std::string stored;
  if (job.values_in_keys) {
    if (!job.format.is_plain()) stored = ", stored as " + describe(job.format.k);
  } else if (!given.is_plain()) {
    stored = fmt::format(", {} {}", job.format.is_plain() ? "decompressed from" : "stored as", describe(given));
  }
  if (input.pages() == nullptr) return "dense" + stored;
  return fmt::format("{} of {} tokens{}{}", counted(static_cast<std::uint64_t>(input.pages()->pages), "page"),
                     input.pages()->page_size, input.head_major_pages() ? ", head-major" : "", stored);
}

std::string deal_text(const DecodePlanSummary& step) {
  if (!step.job.spec.block_mask.any()) return fmt::format("distributed by KV splits of {} keys", step.kv_split_keys);
  const DecodeDeal& deal = step.deal;
  if (deal.ranks() == 1) return "whole on one rank";
  std::string text = fmt::format("distributed by {}", deal_name(deal));
  if (step.idle() > 0) text += fmt::format("; {} of {} ranks have no work", step.idle(), deal.ranks());
  return text;
}

std::string held_text(const DecodePlanSummary& step, std::size_t rank) {
  const std::string heads =
      step.deal.heads == 1 ? "" : " of " + counted(static_cast<std::uint64_t>(step.kv_heads[rank]), "K/V head");
  return fmt::format("rank {} holds {} keys{}, owns {} rows", rank, step.keys[rank], heads, step.rows[rank]);
}

void write_memory(JsonWriter& json, const DecodeMemory& memory) {
  json.key("memory").begin_object().member("cache", memory.cache).member("tables", memory.tables);
  json.member("rows", memory.rows).member("scratch", memory.scratch).member("partials", memory.partials).end_object();
}

std::string AttentionOpJob::describe() const {
  return input_.decodes() ? "decode, " + ringattn::describe(input_) : ringattn::describe(input_);
}

std::string AttentionOpJob::describe_shape() const {
  const AttentionSpec& spec = input_.job().spec;
  return fmt::format("{}{}, scale {}", input_.decodes() ? "decode, " : "", ringattn::describe(spec),
                     spec.softmax_scale);
}

InputShape AttentionOpJob::shape() const { return attention_shape(op(), input_.job()); }

double AttentionOpJob::flops() const { return job_flops(input_); }

void AttentionOpJob::write_job(JsonWriter& json) const {
  json.begin_object();
  write_attention_spec(json, input_.job().spec);
  write_attention_tokens(json, input_.job().batch);
  json.end_object();
}

void AttentionOpJob::prepare(Transport& world, const Options& options) {
  rank_ = world.rank();
  prepared_.emplace(input_, world, options);
  if (!replayed_as_) return;
  const Collective collective(world, Timeouts(options.timeout_seconds));
  collective.run_collectively(
      [&] { check_replay_kernel(kernel(), *replayed_as_, compatible_request(options.kernel, world)); });
}

const std::string& AttentionOpJob::kernel_reason() {
  return input_.decodes() ? prepared_->decode().kernel().reason : prepared_->ring().kernel.reason;
}

PlanFigures AttentionOpJob::plan(const Collective& collective) {
  PlanFigures figures;
  if (input_.decodes()) {
    const DecodePlanSummary& step = prepared_->step();
    figures.blocks = step.kv_splits;
    figures.layout = deal_name(step.deal);
    figures.stripe = step.kv_split_keys;
    figures.bytes_moved = step.bytes_moved();
    figures.memory_per_rank = step.memory.total();
    figures.bytes_read = step.bytes_read;
    return figures;
  }
  const RingOp ring = prepared_->ring();
  return plan_figures(collective, ring.plan, ring.layout, ring.time_estimate);
}

void AttentionOpJob::write_plan(JsonWriter& json) {
  if (!input_.decodes()) return;
  json.member("bytes_read", prepared_->step().bytes_read);
  write_memory(json, prepared_->step().memory);
}

std::vector<std::string> AttentionOpJob::plan_lines(const PlanFigures& plan) {
  std::vector<std::string> lines;
  if (input_.decodes()) {
    const DecodePlanSummary& step = prepared_->step();
    lines.push_back(fmt::format("cache: {}; {}{}, {} planned for a rank", cache_text(input_, step.job), deal_text(step),
                                sent_text(plan), format_bytes(static_cast<double>(step.memory.total()))));
    return lines;
  }
  if (std::string text = read_rows_text(input_); !text.empty()) lines.push_back(std::move(text));
  lines.push_back(plan_text(prepared_->ring().layout.request, plan));
  return lines;
}

std::vector<std::string> AttentionOpJob::plan_details() {
  std::vector<std::string> lines;
  if (input_.decodes()) {
    const DecodePlanSummary& step = prepared_->step();
    for (std::size_t rank = 0; rank < step.keys.size(); ++rank) {
      lines.push_back(fmt::format("{}, receives {}", held_text(step, rank),
                                  format_bytes(static_cast<double>(step.received[rank]))));
    }
    return lines;
  }
  return block_lines(prepared_->ring().plan);
}

RankFigures AttentionOpJob::figures_of(PreparedJob& prepared, int rank, const RankResult& result) {
  RankFigures mine;
  if (prepared.input().decodes()) {
    const DecodePlanSummary& step = prepared.step();
    mine.seconds = result.stats.seconds;
    mine.memory_planned = step.memory.total();
    mine.bytes_received = step.received[static_cast<std::size_t>(rank)];
  } else {
    mine = run_figures(prepared.ring().plan, result.stats);
  }
  mine.tokens = result.rows;
  mine.non_finite = result.non_finite;
  return mine;
}

RankFigures AttentionOpJob::run(const ProgressCallback& on_progress) {
  result_ = prepared_->compute(on_progress);
  return figures_of(*prepared_, rank_, result());
}

std::vector<ResultDigest> AttentionOpJob::digests(const Collective& collective) {
  digests_ = digest_result(input_, result(), collective);
  return {{"out", "out", digests_.out}, {"lse", "lse", digests_.lse}};
}

void AttentionOpJob::write(const OutputRequest& output) {
  const AttentionSpec& spec = input_.job().spec;
  FileMetadata metadata = output_metadata(kernel(), identity_of(kernel(), backend(), spec.dtype), digests_);
  metadata.emplace_back("softmax_scale", fmt::format("{}", spec.softmax_scale));
  std::ranges::move(own_metadata(), std::back_inserter(metadata));
  metadata.insert(metadata.end(), output.metadata.begin(), output.metadata.end());
  write_output(input_, result(), output.path, output.replace, metadata, prepared_->collective());
}

std::vector<Cell> AttentionOpJob::columns(const Totals& totals) const {
  const Job& job = input_.job();
  if (!input_.decodes()) return ring_cells(job, totals, "out");
  const double rate = totals.seconds > 0.0 ? totals.plan->bytes_read / totals.seconds * 1e-9 : 0.0;
  std::vector<Cell> cells{
      {"keys", "", fmt::format("{}", job.batch.k_tokens())},
      {"seqs", "", fmt::format("{}", job.batch.sequences.size())},
      {"rows", "", fmt::format("{}", job.batch.q_tokens())},
      {"page", "", input_.pages() == nullptr ? "dense" : fmt::format("{}", input_.pages()->page_size)}};
  std::ranges::move(spec_cells(job.spec), std::back_inserter(cells));
  cells.insert(cells.end(), {{"step", "(us)", fmt::format("{:.2f}", totals.seconds * 1e6)},
                             {"GB/s", "all ranks", fmt::format("{:.1f}", rate)},
                             {"mem/rank", "(MiB)", mebibytes(totals.memory_peak)},
                             {"digest of out", "", totals.digests->front().hex}});
  return cells;
}

std::string AttentionOpJob::non_finite_text(const NonFinite& total) const {
  return fmt::format("{} values of q, {} of k and {} of v", total.q, total.k, total.v);
}

void AttentionOpJob::write_non_finite(JsonWriter& json, const NonFinite& total) const {
  json.begin_object().member("q", total.q).member("k", total.k).member("v", total.v).end_object();
}

std::string AttentionOpJob::format_text() const {
  const CacheFormat& format = input_.job().format;
  return format.is_plain() ? "" : ", " + ringattn::describe(format);
}

BenchJob AttentionOpJob::bench_job(std::string source) const {
  const Job& job = input_.job();
  const AttentionSpec& spec = job.spec;
  const bool decode = input_.decodes();
  std::string mask_more;
  if (job.block_mask != nullptr) {
    mask_more += fmt::format(", {}, {:.4g} pairs", ringattn::describe(spec.block_mask, spec.heads), visible_pairs(job));
  }
  const std::int64_t batch = std::ssize(job.batch.sequences);
  const std::int64_t seq = decode ? job.batch.k_tokens() : job.batch.q_tokens();
  BenchJob result{std::string(op()),
                  decode ? BenchKind::kStep : BenchKind::kRing,
                  job.batch.q_tokens(),
                  batch > 0 ? seq / batch : 0,
                  batch,
                  bench_members(spec, mask_more + format_text()),
                  std::move(source)};
  if (!decode) return result;
  result.members.emplace_back("keys", job.batch.k_tokens());
  result.members.emplace_back("page_size", input_.pages() != nullptr ? input_.pages()->page_size : 0);
  if (input_.prefix() > 0) result.members.emplace_back("prefix", input_.prefix());
  return result;
}

Measured AttentionOpJob::measure(const MeasureRequest& request, const Collective& collective) {
  Measured measured;
  if (input_.decodes()) {
    const DecodeSample sample = decode_sample(backend().memory(), prepared_->step().memory.cache);
    const std::unique_ptr<LoadedDecode> loaded = prepared_->load_decode(request.on_progress, sample.caches);
    measured.modes.push_back({false, sample_decode(collective, {request.samples, request.on_progress}, *loaded, sample),
                              prepared_->step().bytes_read});
    const RankResult result = loaded->fetch({});
    measured.figures = figures_of(*prepared_, rank_, result);
    measured.digest = digest_result(input_, result, collective).out;
    return measured;
  }
  const std::unique_ptr<LoadedJob> loaded = prepared_->load(request.on_progress);
  measured.modes = measure_runs(collective, request, [&](RunMode mode) { return loaded->run(mode); });
  RankResult last;  // without rows: they needn't leave the device
  last.rows =
      total_tokens(packed_runs(prepared_->ring().layout.queries.runs(collective.rank()), input_.job().batch.cu_q()));
  measured.figures = figures_of(*prepared_, rank_, last);
  return measured;
}

std::vector<TraceEvent> AttentionOpJob::timeline() const { return block_events(result().stats.blocks); }

}  // namespace ringattn
