// SPDX-License-Identifier: Apache-2.0
#include "ops/ssd_backward/ssd_backward_op_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/failpoint.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/common/digest.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kName = "ssd_backward";
constexpr std::string_view kInitial = "dinitial_states";

std::string gradients_text(const SsdBackwardJob& job) {
  return job.gradients == job.forward.spec.dtype ? "" : fmt::format(", gradients in {}", dtype_name(job.gradients));
}

// The shape of a gradient of rows in a file: ddt has no axis of dims.
std::vector<std::int64_t> shape_in_file(const SsdBackwardInput& input, const SsdGradientRows& tensor) {
  std::vector<std::int64_t> shape = input.grid(tensor.heads, tensor.dim).shape();
  if (tensor.name == "ddt") shape.pop_back();
  return shape;
}

}  // namespace

std::string_view SsdBackwardOpJob::op() const { return kName; }

std::string SsdBackwardOpJob::describe() const {
  return ringattn::describe(input_.job()) + gradients_text(input_.job());
}

std::string SsdBackwardOpJob::describe_shape() const { return ringattn::describe(backward_spec(input_.job())); }

InputShape SsdBackwardOpJob::shape() const {
  const SsmJob& job = input_.job().forward;
  InputShape shape{{"op", std::string(kName)},
                   {"dtype", std::string(dtype_name(spec().dtype))},
                   {"heads", fmt::format("{}", spec().heads)},
                   {"head-dim", fmt::format("{}", spec().head_dim)},
                   {"state-dim", fmt::format("{}", spec().state_dim)},
                   {"groups", fmt::format("{}", spec().groups)},
                   {"batch", fmt::format("{}", job.lengths.size())}};
  const auto same = [&](std::int64_t length) { return length == job.lengths.front(); };
  if (std::ranges::all_of(job.lengths, same)) shape["seq"] = fmt::format("{}", job.lengths.front());
  return shape;
}

double SsdBackwardOpJob::flops() const {
  return ssd_backward_token_flops(spec()) * static_cast<double>(input_.job().forward.tokens());
}

std::int64_t SsdBackwardOpJob::result_rows() const { return input_.job().forward.tokens() * spec().heads; }

void SsdBackwardOpJob::write_job(JsonWriter& json) const {
  const SsmJob& job = input_.job().forward;
  json.begin_object();
  write_ssm_spec(json, job.spec);
  json.member("gradients", dtype_name(input_.job().gradients)).member("initial_states", job.initial_states);
  json.member("final_gradients", input_.job().final_gradients);
  json.member("sequences", std::ssize(job.lengths)).member("tokens", job.tokens()).end_object();
}

void SsdBackwardOpJob::prepare(Transport& world, const Options& options) {
  world_ = &world;
  backward_.emplace(input_.job(), world, ssm_options(options));
}

PlanFigures SsdBackwardOpJob::plan(const Collective& collective) {
  PlanFigures figures;
  figures.blocks = std::ssize(backward_->layout().owners());
  figures.layout = layout_name(LayoutKind::kContiguous);
  figures.stripe = kSuperSegmentTokens;
  for (const std::int64_t bytes : collective.gather_values(backward_->bytes_received())) figures.bytes_moved += bytes;
  figures.memory_per_rank = backward_->memory().total();
  figures.estimated_seconds = backward_->estimated_seconds();
  return figures;
}

void SsdBackwardOpJob::write_plan(JsonWriter& json) { write_memory(json, backward_->memory()); }

std::string SsdBackwardOpJob::sent_text(std::int64_t bytes) const {
  const std::int64_t states = bytes / state_bytes(spec());  // half of them are gradients of states
  return fmt::format("{} and their gradients, {} sent", counted(static_cast<std::uint64_t>(states / 2), "state"),
                     format_bytes(static_cast<double>(bytes)));
}

double SsdBackwardOpJob::token_bytes() const { return static_cast<double>(ssd_backward_token_bytes(input_.job())); }

RankFigures SsdBackwardOpJob::figures(const SsmStats& stats, std::int64_t tokens) const {
  RankFigures mine;
  mine.seconds = stats.seconds;
  mine.exposed_comm_seconds = stats.exposed_comm_seconds;
  mine.flops = ssd_backward_token_flops(spec()) * static_cast<double>(tokens);
  mine.memory_planned = backward_->memory().total();
  mine.tokens = tokens;
  mine.bytes_received = backward_->bytes_received();
  return mine;
}

std::vector<ResultDigest> digest_gradients(const SsdBackwardInput& input, const SsdBackwardRankResult& result,
                                           const Collective& collective) {
  const SsdBackwardJob& job = input.job();
  std::vector<ResultDigest> digests;
  const auto add = [&](std::string_view name, const TensorView& view, std::span<const PackedRun> runs,
                       std::int64_t tokens) {
    digests.push_back({std::string(name), std::string(name), digest(collective, view, runs, tokens)});
  };
  const std::vector<SsdGradientRows> tensors = gradient_rows(job.forward.spec);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    add(tensors[i].name, result.rows_view(job, i), result.runs, job.forward.tokens());
  }
  // One row, which rank 0 provides.
  const PackedRun row{0, collective.rank() == 0 ? 1 : 0};
  for (const SsdGradientParameter& parameter : gradient_parameters(job.forward.spec)) {
    const std::vector<float>& values = result.parameters.*parameter.values;
    add(parameter.name,
        dense_view(static_cast<const void*>(values.data()), Dtype::kF32, row.tokens(), job.forward.spec.heads, 1),
        {&row, row.tokens() > 0 ? 1U : 0U}, 1);
  }
  if (job.forward.initial_states) {
    add(kInitial, result.initial_view(job), result.sequences, std::ssize(job.forward.lengths));
  }
  return digests;
}

std::vector<OutputTensor> SsdBackwardOpJob::gradients() const {
  const SsdBackwardJob& job = input_.job();
  std::vector<OutputTensor> tensors;
  for (const SsdGradientRows& tensor : gradient_rows(spec())) {
    tensors.push_back({std::string(tensor.name), file_dtype(job.gradients), shape_in_file(input_, tensor)});
  }
  for (const SsdGradientParameter& parameter : gradient_parameters(spec())) {
    tensors.push_back({std::string(parameter.name), FileDtype::kF32, {spec().heads}});
  }
  if (job.forward.initial_states) {
    tensors.push_back({std::string(kInitial), FileDtype::kF32, input_.forward().states_shape()});
  }
  return tensors;
}

RowGrid SsdBackwardOpJob::states_grid() const {
  return {AxisOrder::kThd, 1, std::ssize(input_.job().forward.lengths), spec().heads,
          std::int64_t{spec().head_dim} * spec().state_dim};
}

void SsdBackwardOpJob::write(const OutputRequest& output) {
  const Collective collective(*world_, Timeouts(backward_->options().timeout_seconds));
  const SsdBackwardJob& job = input_.job();
  const FileMetadata metadata = file_metadata(collective, {}, output.metadata);
  const std::vector<SsdGradientRows> rows = gradient_rows(spec());
  write_collectively(collective, gradients(), metadata, output.path, output.replace, [&](SafetensorsWriter& writer) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      writer.write_rows(rows[i].name, input_.grid(rows[i].heads, rows[i].dim), result_->runs,
                        result_->rows_view(job, i));
      failpoint("writing");
    }
    if (collective.rank() == 0) {
      for (const SsdGradientParameter& parameter : gradient_parameters(spec())) {
        writer.write_bytes(parameter.name, std::as_bytes(std::span(result_->parameters.*parameter.values)));
      }
    }
    if (!job.forward.initial_states) return;
    writer.write_rows(kInitial, states_grid(), result_->sequences, result_->initial_view(job));
  });
}

std::vector<Cell> SsdBackwardOpJob::columns(const Totals& totals) const {
  const SsmJob& job = input_.job().forward;
  const auto tokens = static_cast<double>(job.tokens());
  const auto rate = [&](double amount) { return totals.seconds > 0.0 ? amount / totals.seconds : 0.0; };
  return {{"tokens", "", fmt::format("{}", job.tokens())},
          {"seqs", "", fmt::format("{}", job.lengths.size())},
          {"heads", "", fmt::format("{}", spec().heads)},
          {"dim", "", fmt::format("{}", spec().head_dim)},
          {"state", "", fmt::format("{}", spec().state_dim)},
          {"groups", "", fmt::format("{}", spec().groups)},
          {"dtype", "", std::string(dtype_name(spec().dtype))},
          {"time", "(ms)", fmt::format("{:.3f}", totals.seconds * 1e3)},
          {"Mtokens/s", "", fmt::format("{:.3f}", rate(tokens) * 1e-6)},
          {"exposed comm", "(ms)", fmt::format("{:.3f}", totals.exposed_comm_seconds * 1e3)},
          {"mem/rank", "(MiB)", fmt::format("{:.1f}", static_cast<double>(totals.memory_peak) / 0x1p20)},
          {"digest of dx", "", totals.digests->front().hex}};
}

std::string SsdBackwardOpJob::non_finite_text(const NonFinite& total) const {
  return fmt::format("{} values of the rows", total.total());
}

Golden SsdBackwardOpJob::golden() {
  Golden golden = golden_of(input_.forward(), kernel().name, identity_of(kernel(), backend()));
  golden.job = fmt::format("gradients of {}{}{}", golden.job, gradients_text(input_.job()),
                           input_.job().final_gradients ? ", with gradients of final states" : "");
  return golden;
}

BenchJob SsdBackwardOpJob::bench_job(std::string source) const {
  BenchJob result = SsmOpJob(input_.forward()).bench_job(std::move(source));
  result.op = std::string(kName);
  if (input_.job().gradients != spec().dtype) {
    result.members.emplace_back("gradients", std::string(dtype_name(input_.job().gradients)));
  }
  return result;
}

}  // namespace ringattn
