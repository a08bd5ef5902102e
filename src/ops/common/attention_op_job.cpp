// SPDX-License-Identifier: Apache-2.0
#include "ops/common/attention_op_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/input_cost.hpp"
#include "ops/common/output.hpp"
#include "ops/decode/replay.hpp"

namespace ringattn {

namespace {

bool all_equal(const std::vector<std::int64_t>& lengths) {
  return std::ranges::all_of(lengths, [&](std::int64_t length) { return length == lengths.front(); });
}

std::string dims_text(const AttentionSpec& spec) {
  return spec.head_dim_v == spec.head_dim ? fmt::format("{}", spec.head_dim)
                                          : fmt::format("{}/{}", spec.head_dim, spec.head_dim_v);
}

// One word, for a column.
std::string mask_text(const AttentionSpec& spec) {
  std::string mask = describe(spec.mask);
  std::replace(mask.begin(), mask.end(), ' ', ':');
  return mask;
}

std::string mebibytes(std::size_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / 0x1p20); }

// ", 1.5 MiB sent"; empty where ranks send each other nothing.
std::string sent_text(const PlanFigures& plan) {
  return plan.bytes_moved == 0 ? "" : fmt::format(", {} sent", format_bytes(static_cast<double>(plan.bytes_moved)));
}

}  // namespace

std::string layout_text(const LayoutRequest& request) {
  std::string text(layout_name(request.kind));
  if (request.stripe > 0) text += fmt::format(", stripe {} tokens", request.stripe);
  return text;
}

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
  const AttentionSpec& spec = input_.job().spec;
  const MlaSpec* const latents = input_.op() == Op::kMla ? &input_.latent().spec : nullptr;
  InputShape shape;
  const auto add = [&](std::string_view setting, auto value) {
    shape[std::string(setting)] = fmt::format("{}", value);
  };
  add("op", op_name(input_.op()));
  add("dtype", dtype_name(spec.dtype));
  add("heads", spec.heads);
  add("head-dim", latents == nullptr ? spec.head_dim : latents->head_dim);
  add("head-dim-v", spec.head_dim_v);
  if (latents != nullptr) {
    add("rope-dim", latents->rope_dim);
    add("latent-dim", latents->latent_dim);
  } else {
    add("kv-heads", spec.kv_heads);
  }
  const std::vector<std::int64_t> q = input_.job().batch.q_lengths();
  const std::vector<std::int64_t> k = input_.job().batch.k_lengths();
  add("batch", k.size());
  if (!k.empty() && all_equal(k)) add("seq", k.front());
  if (!q.empty() && all_equal(q)) add("q-len", q.front());
  return shape;
}

double AttentionOpJob::flops() const { return job_flops(input_); }

void AttentionOpJob::write_job(JsonWriter& json) const {
  const Job& job = input_.job();
  const AttentionSpec& spec = job.spec;
  json.begin_object().member("dtype", dtype_name(spec.dtype)).member("heads", spec.heads);
  json.member("kv_heads", spec.kv_heads).member("head_dim", spec.head_dim).member("head_dim_v", spec.head_dim_v);
  json.member("mask", ringattn::describe(spec.mask)).member("softmax_scale", static_cast<double>(spec.softmax_scale));
  json.member("softcap", static_cast<double>(spec.softcap)).member("sinks", spec.sinks);
  if (input_.op() == Op::kMla) {
    json.member("rope_dim", input_.latent().spec.rope_dim).member("latent_dim", input_.latent().spec.latent_dim);
  }
  json.member("sequences", static_cast<std::int64_t>(job.batch.sequences.size()));
  json.member("q_tokens", job.batch.q_tokens()).member("k_tokens", job.batch.k_tokens()).end_object();
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
  const RingOp ring = prepared_->ring();
  figures.blocks = static_cast<std::int64_t>(ring.plan.blocks.size());
  figures.layout = layout_name(ring.layout.request.kind);
  figures.stripe = ring.layout.request.stripe;
  if (input_.op() == Op::kMla) {
    bytes_moved_expanded_ = 0;
    for (const std::int64_t bytes : collective.gather_values(prepared_->latent().expanded_bytes_received())) {
      bytes_moved_expanded_ += bytes;
    }
  }
  figures.estimated_seconds = 0.0;
  struct Mine {
    std::int64_t bytes_received;
    std::size_t memory;
    double seconds;
  };
  for (const Mine& theirs :
       collective.gather_values(Mine{ring.plan.bytes_received(), ring.plan.memory_bytes, ring.time_estimate.seconds})) {
    figures.bytes_moved += theirs.bytes_received;
    figures.memory_per_rank = std::max(figures.memory_per_rank, theirs.memory);
    figures.estimated_seconds = std::max(*figures.estimated_seconds, theirs.seconds);
  }
  return figures;
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
  lines.push_back(fmt::format("layout: {}; {} block{}{}, {} planned for a rank",
                              layout_text(prepared_->ring().layout.request), plan.blocks, plan.blocks == 1 ? "" : "s",
                              sent_text(plan), format_bytes(static_cast<double>(plan.memory_per_rank))));
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
  const Plan& plan = prepared_->ring().plan;
  for (std::size_t index = 0; index < plan.blocks.size(); ++index) {
    const BlockPlan& block = plan.blocks[index];
    lines.push_back(fmt::format("block {}: keys {} to {}; rank 0 receives {}, computes {:.3f} GFLOP", index,
                                block.first_token, block.last_token,
                                format_bytes(static_cast<double>(block.bytes_received)), block.flops / 1e9));
  }
  return lines;
}

RankFigures AttentionOpJob::figures_of(PreparedFileJob& prepared, int rank, const RankResult& result) {
  RankFigures mine;
  mine.seconds = result.stats.seconds;
  mine.tokens = result.rows;
  mine.non_finite = result.non_finite;
  if (prepared.input().decodes()) {
    const DecodePlanSummary& step = prepared.step();
    mine.memory_planned = step.memory.total();
    mine.bytes_received = step.received[static_cast<std::size_t>(rank)];
    return mine;
  }
  const Plan& plan = prepared.ring().plan;
  mine.exposed_comm_seconds = result.stats.exposed_comm_seconds;
  mine.flops = plan.flops();
  mine.memory_planned = plan.memory_bytes;
  mine.bytes_received = plan.bytes_received();
  mine.bytes_sent = plan.bytes_sent();
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
  const AttentionSpec& spec = job.spec;
  const std::string& digest = totals.digests->front().hex;
  const Cell memory{"mem/rank", "(MiB)", mebibytes(totals.memory_peak)};
  const std::string sequences = fmt::format("{}", job.batch.sequences.size());
  const std::string rows = fmt::format("{}", job.batch.q_tokens());
  const auto shape = {Cell{"heads", "", fmt::format("{}", spec.heads)},
                      {"kv", "", fmt::format("{}", spec.kv_heads)},
                      {"dim", "", dims_text(spec)},
                      {"dtype", "", std::string(dtype_name(spec.dtype))},
                      {"mask", "", mask_text(spec)}};
  std::vector<Cell> cells;
  if (input_.decodes()) {
    const double rate = totals.seconds > 0.0 ? totals.plan->bytes_read / totals.seconds * 1e-9 : 0.0;
    cells = {{"keys", "", fmt::format("{}", job.batch.k_tokens())},
             {"seqs", "", sequences},
             {"rows", "", rows},
             {"page", "", input_.pages() == nullptr ? "dense" : fmt::format("{}", input_.pages()->page_size)}};
    cells.insert(cells.end(), shape);
    cells.insert(cells.end(), {{"step", "(us)", fmt::format("{:.2f}", totals.seconds * 1e6)},
                               {"GB/s", "all ranks", fmt::format("{:.1f}", rate)},
                               memory,
                               {"digest of out", "", digest}});
    return cells;
  }
  const bool tera = totals.flops_per_second_per_rank >= 1e12;
  const double exposed = totals.seconds > 0.0 ? 100.0 * totals.exposed_comm_seconds / totals.seconds : 0.0;
  cells = {{"tokens", "", rows}, {"seqs", "", sequences}};
  cells.insert(cells.end(), shape);
  cells.insert(cells.end(), {{"time", "(ms)", fmt::format("{:.3f}", totals.seconds * 1e3)},
                             {tera ? "TFLOP/s" : "GFLOP/s", "per rank",
                              fmt::format("{:.1f}", totals.flops_per_second_per_rank / (tera ? 1e12 : 1e9))},
                             {"exposed comm", "(%)", fmt::format("{:.1f}", exposed)},
                             memory,
                             {"digest of out", "", digest}});
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
  std::string mask = ringattn::describe(spec.mask);
  if (spec.softcap > 0.0F) mask += fmt::format(", softcap {}", spec.softcap);
  if (spec.sinks) mask += ", sinks";
  if (job.block_mask != nullptr) {
    mask += fmt::format(", {}, {:.4g} pairs", ringattn::describe(spec.block_mask, spec.heads), visible_pairs(job));
  }
  if (!job.format.is_plain()) mask += ", " + ringattn::describe(job.format);
  if (latent && !input_.latent().format.is_plain()) mask += ", " + ringattn::describe(input_.latent().format);
  const std::int64_t batch = std::ssize(job.batch.sequences);
  const std::int64_t seq = decode ? job.batch.k_tokens() : job.batch.q_tokens();
  BenchJob result{std::string(op()),
                  decode ? BenchKind::kStep : BenchKind::kRing,
                  job.batch.q_tokens(),
                  batch > 0 ? seq / batch : 0,
                  batch,
                  {{"heads", spec.heads},
                   {"kv_heads", spec.kv_heads},
                   {"head_dim", spec.head_dim},
                   {"head_dim_v", spec.head_dim_v},
                   {"dtype", std::string(dtype_name(spec.dtype))},
                   {"mask", mask}},
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
  const SampleRequest sampling{request.samples, request.on_progress};
  if (input_.decodes()) {
    const DecodeSample sample = decode_sample(backend().memory(), prepared_->step().memory.cache);
    const std::unique_ptr<LoadedDecode> loaded = prepared_->load_decode(request.on_progress, sample.caches);
    measured.modes.push_back(
        {false, sample_decode(collective, sampling, *loaded, sample), prepared_->step().bytes_read});
    const RankResult result = loaded->fetch({});
    measured.figures = figures(result);
    measured.digest = digest_result(input_, result, collective).out;
    return measured;
  }
  const std::unique_ptr<LoadedJob> loaded = prepared_->load(request.on_progress);
  std::vector<RunMode> modes{request.compute_only ? RunMode::kComputeOnly : RunMode::kWhole};
  if (request.also_compute) modes.push_back(RunMode::kComputeOnly);
  const std::vector<Samples> samples = sample_runs(collective, sampling, *loaded, modes);
  for (std::size_t mode = 0; mode < modes.size(); ++mode) {
    measured.modes.push_back({modes[mode] == RunMode::kComputeOnly, samples[mode], 0.0});
  }
  RankResult last;  // without rows: they needn't leave the device
  last.rows =
      total_tokens(packed_runs(prepared_->ring().layout.queries.runs(collective.rank()), input_.job().batch.cu_q()));
  measured.figures = figures(last);
  return measured;
}

std::vector<TraceEvent> AttentionOpJob::timeline() const {
  std::vector<TraceEvent> events;
  const std::vector<BlockTimes>& blocks = result_->rank.stats.blocks;
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    const BlockTimes& times = blocks[block];
    const std::string name = fmt::format("block {}", block);
    events.push_back({0, name, times.compute_begin, times.compute_end});
    events.push_back({1, name, times.wait_begin, times.compute_begin});
    events.push_back({2, name, times.posted, times.compute_begin});
  }
  return events;
}

}  // namespace ringattn
