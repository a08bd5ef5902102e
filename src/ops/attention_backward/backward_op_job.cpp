// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/backward_op_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/tokens/cost.hpp"
#include "base/failpoint.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/common/digest.hpp"
#include "ops/jobs/model_comparison.hpp"
#include "ops/jobs/ring_report.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kName = "attention_backward";

std::string gradients_text(const BackwardInput& input) {
  const BackwardJob& job = input.job();
  std::string text;
  if (job.gradients != job.forward.spec.dtype) text = fmt::format(", gradients in {}", dtype_name(job.gradients));
  return input.has_dlse() ? text + ", with dlse" : text;
}

}  // namespace

std::string_view BackwardOpJob::op() const { return kName; }

std::string BackwardOpJob::describe() const { return ringattn::describe(input_.job()) + gradients_text(input_); }

double BackwardOpJob::flops() const {
  return backward_flops(input_.job()) + (input_.with_forward() ? job_flops(input_.job().forward) : 0.0);
}

std::string BackwardOpJob::describe_shape() const {
  const AttentionSpec& spec = input_.job().forward.spec;
  return fmt::format("backward of {}, scale {}{}", ringattn::describe(spec), spec.softmax_scale,
                     gradients_text(input_));
}

void BackwardOpJob::check_model(const ModelComparison& compare) const {
  compare.same_attention(input_.job().forward.spec);
}

std::vector<MessageTemplate> BackwardOpJob::notes() const {
  if (!input_.is_synthetic() || input_.with_forward()) return {};
  return {{"out and lse: computed by the forward first, whose time is not counted"}};
}

InputShape BackwardOpJob::shape() const { return attention_shape(kName, input_.job().forward); }

std::int64_t BackwardOpJob::result_rows() const {
  const Job& job = input_.job().forward;
  return job.batch.q_tokens() * job.spec.heads + job.batch.k_tokens() * job.spec.kv_heads;
}

void BackwardOpJob::write_job(JsonWriter& json) const {
  const BackwardJob& job = input_.job();
  json.begin_object();
  write_attention_spec(json, job.forward.spec);
  json.member("gradients", dtype_name(job.gradients)).member("dlse", input_.has_dlse());
  write_attention_tokens(json, job.forward.batch);
  json.end_object();
}

void BackwardOpJob::prepare(Transport& world, const Options& options) {
  world_ = &world;
  backward_.emplace(input_.job(), world, options);
}

PlanFigures BackwardOpJob::plan(const Collective& collective) {
  max_state_ = std::ranges::max(collective.gather_values(backward_->state_bytes()));
  PlanFigures figures = plan_figures(collective, backward_->plan(), backward_->layout(), backward_->time_estimate());
  if (input_.with_forward()) figures.estimated_seconds.reset();  // the estimate is only for the gradients
  return figures;
}

void BackwardOpJob::write_plan(JsonWriter& json) { json.member("state_per_rank", max_state_); }

std::vector<std::string> BackwardOpJob::plan_lines(const PlanFigures& plan) {
  std::string line = plan_text(backward_->layout().request, plan);
  if (max_state_ > 0) {
    line += fmt::format(", {} of it for sums of dQ, dK and dV", format_bytes(static_cast<double>(max_state_)));
  }
  std::vector<std::string> lines{std::move(line)};
  if (input_.is_synthetic()) {
    lines.emplace_back(input_.with_forward() ? "forward: out and lse are computed in each run, and counted"
                                             : "forward: out and lse are computed first; their time is not counted");
  }
  return lines;
}

std::vector<std::string> BackwardOpJob::plan_details() { return block_lines(backward_->plan()); }

RankFigures BackwardOpJob::figures(const BackwardRankResult& result) const {
  RankFigures mine = run_figures(backward_->plan(), result.stats);
  mine.tokens = result.q_rows();
  mine.non_finite = result.non_finite;
  return mine;
}

RankFigures BackwardOpJob::run(const ProgressCallback& on_progress) {
  const Collective collective(*world_, Timeouts(backward_->options().timeout_seconds));
  LoadedBackward loaded(input_, *backward_, collective, *world_, on_progress);
  result_ = loaded.fetch(loaded.run(RunMode::kWhole, on_progress));
  return figures(*result_);
}

std::vector<ResultDigest> digest_gradients(const BackwardInput& input, const BackwardRankResult& result,
                                           const Collective& collective) {
  const BackwardJob& job = input.job();
  std::vector<ResultDigest> digests;
  for (const GradientTensor& tensor : gradient_tensors(job.forward.spec)) {
    const std::int64_t tokens = cumulative_tokens(job.forward.batch, tensor.axis).back();
    const std::string name(tensor.name);
    digests.push_back({name, name, digest(collective, (result.*tensor.view)(job), tensor.runs(result), tokens)});
  }
  if (!job.forward.spec.sinks) return digests;
  // One row, which rank 0 provides.
  const PackedRun row{0, collective.rank() == 0 ? 1 : 0};
  const TensorView view =
      dense_view(static_cast<const void*>(result.dsinks.data()), Dtype::kF32, row.tokens(), job.forward.spec.heads, 1);
  digests.push_back({"dsinks", "dsinks", digest(collective, view, {&row, row.tokens() > 0 ? 1U : 0U}, 1)});
  return digests;
}

void BackwardOpJob::write(const OutputRequest& output) {
  const Collective collective(*world_, Timeouts(backward_->options().timeout_seconds));
  const BackwardJob& job = input_.job();
  const AttentionSpec& spec = job.forward.spec;
  const std::vector<GradientTensor> gradients = gradient_tensors(spec);
  const FileMetadata metadata =
      file_metadata(collective, {{"softmax_scale", fmt::format("{}", spec.softmax_scale)}}, output.metadata);
  std::vector<OutputTensor> tensors;
  const auto grid = [&](const GradientTensor& tensor) { return input_.grid(tensor.axis, tensor.heads, tensor.dim); };
  for (const GradientTensor& tensor : gradients) {
    tensors.push_back({std::string(tensor.name), file_dtype(job.gradients), grid(tensor).shape()});
  }
  if (spec.sinks) tensors.push_back({"dsinks", FileDtype::kF32, {spec.heads}});
  write_collectively(collective, tensors, metadata, output.path, output.replace, [&](SafetensorsWriter& writer) {
    for (const GradientTensor& tensor : gradients) {
      writer.write_rows(tensor.name, grid(tensor), tensor.runs(*result_), ((*result_).*tensor.view)(job));
      failpoint("writing");
    }
    if (spec.sinks && collective.rank() == 0) writer.write_bytes("dsinks", std::as_bytes(std::span(result_->dsinks)));
  });
}

std::vector<Cell> BackwardOpJob::columns(const Totals& totals) const {
  return ring_cells(input_.job().forward, totals, "dq");
}

std::string BackwardOpJob::non_finite_text(const NonFinite& total) const {
  return fmt::format("{} values of q, {} of k, {} of v, {} of out, {} of lse and {} of its and out's gradients",
                     total.q, total.k, total.v, total.out, total.lse, total.dout);
}

void BackwardOpJob::write_non_finite(JsonWriter& json, const NonFinite& total) const {
  json.begin_object().member("q", total.q).member("k", total.k).member("v", total.v).member("out", total.out);
  json.member("lse", total.lse).member("dout", total.dout).end_object();
}

Golden BackwardOpJob::golden() {
  const Job& job = input_.job().forward;
  std::string sequences;
  if (job.batch.sequences.size() <= 8) {
    for (const Sequence& s : job.batch.sequences) sequences += fmt::format(" {}x{}@{}", s.q_len, s.k_len, s.q_offset);
  }
  // The forward kernel computes out and lse of synthetic inputs, with AMX tiles for bf16 if it has them.
  const std::string target =
      job.spec.dtype == Dtype::kBf16 ? backend().identity() : identity_of(kernel(), backend(), job.spec.dtype);
  return golden_of(fmt::format("{}; {}; scale {};{}", input_.is_synthetic() ? input_.source() : "a file", describe(),
                               job.spec.softmax_scale, sequences),
                   kernel().name, target);
}

BenchJob BackwardOpJob::bench_job(std::string source) const {
  const BackwardJob& job = input_.job();
  const std::int64_t batch = std::ssize(job.forward.batch.sequences);
  const std::int64_t tokens = job.forward.batch.q_tokens();
  BenchJob result{std::string(kName),
                  BenchKind::kRing,
                  tokens,
                  batch > 0 ? tokens / batch : 0,
                  batch,
                  bench_members(job.forward.spec),
                  std::move(source)};
  if (job.forward.batch.k_tokens() != tokens) result.members.emplace_back("keys", job.forward.batch.k_tokens());
  if (job.gradients != job.forward.spec.dtype) {
    result.members.emplace_back("gradients", std::string(dtype_name(job.gradients)));
  }
  if (input_.has_dlse()) result.members.emplace_back("dlse", 1);
  if (input_.with_forward()) result.members.emplace_back("pass", "forward+backward");
  return result;
}

Measured BackwardOpJob::measure(const MeasureRequest& request, const Collective& collective) {
  Measured measured;
  LoadedBackward loaded(input_, *backward_, collective, *world_, request.on_progress);
  measured.modes = measure_runs(collective, request, [&](RunMode mode) { return loaded.run(mode); });
  measured.figures = run_figures(backward_->plan(), {});
  measured.figures.tokens = backward_->q_rows();
  return measured;
}

std::vector<TraceEvent> BackwardOpJob::timeline() const { return block_events(result_->stats.blocks); }

}  // namespace ringattn
