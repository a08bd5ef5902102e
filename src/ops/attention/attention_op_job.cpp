// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/attention_op_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/attention_jobs/input_cost.hpp"
#include "ops/attention_jobs/output.hpp"
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
    const bool cached = input.op() != Op::kMla || input.pages() != nullptr;
    return (cached ? "cache: read into rows; " : "op: mla, ring attention; ") + input.not_decoded_reason();
  }
  if (input.pages() == nullptr) return {};
  if (input.op() == Op::kMla) return "cache: read into rows";
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
  const std::string_view decode = input_.decodes() ? "decode, " : "";
  if (input_.op() == Op::kMla) return fmt::format("{}{}", decode, ringattn::describe(input_.latent().spec));
  const AttentionSpec& spec = input_.job().spec;
  return fmt::format("{}{}, scale {}", decode, ringattn::describe(spec), spec.softmax_scale);
}

InputShape AttentionOpJob::shape() const {
  InputShape shape = attention_shape(op(), input_.job());
  if (input_.op() != Op::kMla) return shape;
  const MlaSpec& latents = input_.latent().spec;
  shape.erase("kv-heads");
  shape["head-dim"] = fmt::format("{}", latents.head_dim);
  shape["rope-dim"] = fmt::format("{}", latents.rope_dim);
  shape["latent-dim"] = fmt::format("{}", latents.latent_dim);
  return shape;
}

double AttentionOpJob::flops() const { return job_flops(input_); }

void AttentionOpJob::write_job(JsonWriter& json) const {
  json.begin_object();
  write_attention_spec(json, input_.job().spec);
  if (input_.op() == Op::kMla) {
    json.member("rope_dim", input_.latent().spec.rope_dim).member("latent_dim", input_.latent().spec.latent_dim);
  }
  write_attention_tokens(json, input_.job().batch);
  json.end_object();
}

void AttentionOpJob::prepare(Transport& world, const Options& options) {
  rank_ = world.rank();
  prepared_.emplace(input_, world, options, heads_at_a_time_);
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
  if (input_.op() == Op::kMla) {
    bytes_moved_expanded_ = 0;
    for (const std::int64_t bytes : collective.gather_values(prepared_->latent().expanded_bytes_received())) {
      bytes_moved_expanded_ += bytes;
    }
  }
  const RingOp ring = prepared_->ring();
  return plan_figures(collective, ring.plan, ring.layout, ring.time_estimate);
}

void AttentionOpJob::write_plan(JsonWriter& json) {
  if (input_.decodes()) {
    json.member("bytes_read", prepared_->step().bytes_read);
    write_memory(json, prepared_->step().memory);
  }
  if (input_.op() != Op::kMla) return;
  json.member("form", form_name(input_.form().form));
  if (input_.decodes()) return;
  json.member("heads_at_a_time", prepared_->latent().heads_at_a_time());
  json.member("bytes_moved_expanded", bytes_moved_expanded_);
}

std::vector<std::string> AttentionOpJob::plan_lines(const PlanFigures& plan) {
  std::vector<std::string> lines;
  if (input_.decodes()) {
    const DecodePlanSummary& step = prepared_->step();
    if (input_.op() == Op::kMla) lines.push_back(form_text(input_));
    lines.push_back(fmt::format("cache: {}; {}{}, {} planned for a rank", cache_text(input_, step.job), deal_text(step),
                                sent_text(plan), format_bytes(static_cast<double>(step.memory.total()))));
    return lines;
  }
  if (input_.op() == Op::kMla) {
    const int heads = prepared_->latent().heads_at_a_time();
    lines.push_back(
        fmt::format("{}; {} at a time", form_text(input_), counted(static_cast<std::uint64_t>(heads), "head")));
    const MlaSpec& spec = input_.latent().spec;
    if (plan.bytes_moved > 0) {
      const std::string of_heads = spec.q_in_latent || spec.out_in_latent
                                       ? ""
                                       : fmt::format(" instead of {} of keys and values",
                                                     format_bytes(static_cast<double>(bytes_moved_expanded_)));
      lines.push_back(fmt::format("latents: {} sent{}", format_bytes(static_cast<double>(plan.bytes_moved)), of_heads));
    }
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

RankFigures AttentionOpJob::figures_of(PreparedFileJob& prepared, int rank, const RankResult& result) {
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
  result_ = FileJobResult{prepared_->compute(on_progress), {}};
  return figures(result_->rank);
}

std::vector<ResultDigest> AttentionOpJob::digests(const Collective& collective) {
  result_->digests = digest_result(input_, result_->rank, collective);
  return {{"out", "out", result_->digests.out}, {"lse", "lse", result_->digests.lse}};
}

void AttentionOpJob::write(const OutputRequest& output) {
  prepared_->write(*result_, output.path, output.replace, output.metadata);
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
  const bool latents = input_.op() == Op::kMla;
  return fmt::format("{} values of q, {} of {} and {} of {}", total.q, total.k,
                     latents ? "latents and rotary keys" : "k", total.v, latents ? "matrices" : "v");
}

void AttentionOpJob::write_non_finite(JsonWriter& json, const NonFinite& total) const {
  json.begin_object().member("q", total.q).member("k", total.k).member("v", total.v).end_object();
}

BenchJob AttentionOpJob::bench_job(std::string source) const {
  const Job& job = input_.job();
  const AttentionSpec& spec = job.spec;
  const bool decode = input_.decodes();
  const bool latent = input_.op() == Op::kMla;
  std::string mask_more;
  if (job.block_mask != nullptr) {
    mask_more += fmt::format(", {}, {:.4g} pairs", ringattn::describe(spec.block_mask, spec.heads), visible_pairs(job));
  }
  if (!job.format.is_plain()) mask_more += ", " + ringattn::describe(job.format);
  if (latent && !input_.latent().format.is_plain()) mask_more += ", " + ringattn::describe(input_.latent().format);
  const std::int64_t batch = std::ssize(job.batch.sequences);
  const std::int64_t seq = decode ? job.batch.k_tokens() : job.batch.q_tokens();
  BenchJob result{std::string(op()),
                  decode ? BenchKind::kStep : BenchKind::kRing,
                  job.batch.q_tokens(),
                  batch > 0 ? seq / batch : 0,
                  batch,
                  bench_members(spec, mask_more),
                  std::move(source)};
  const auto add = [&](std::string_view name, BenchValue value) {
    result.members.emplace_back(name, std::move(value));
  };
  if (decode || latent) add("keys", job.batch.k_tokens());
  if (decode) {
    add("page_size", input_.pages() != nullptr ? input_.pages()->page_size : 0);
    if (input_.prefix() > 0) add("prefix", input_.prefix());
  }
  if (latent) {
    add("form", std::string(form_name(input_.form().form)));
    add("rope_dim", input_.latent().spec.rope_dim);
    add("latent_dim", input_.latent().spec.latent_dim);
  }
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
    measured.figures = figures(result);
    measured.digest = digest_result(input_, result, collective).out;
    return measured;
  }
  const std::unique_ptr<LoadedJob> loaded = prepared_->load(request.on_progress);
  measured.modes = measure_runs(collective, request, [&](RunMode mode) { return loaded->run(mode); });
  RankResult last;  // without rows: they needn't leave the device
  last.rows =
      total_tokens(packed_runs(prepared_->ring().layout.queries.runs(collective.rank()), input_.job().batch.cu_q()));
  measured.figures = figures(last);
  return measured;
}

std::vector<TraceEvent> AttentionOpJob::timeline() const { return block_events(result_->rank.stats.blocks); }

}  // namespace ringattn
