// SPDX-License-Identifier: Apache-2.0
#include "ops/conv1d_backward/conv1d_backward_op_job.hpp"

#include <fmt/format.h>

#include <utility>

#include "attention/ring/warm_up.hpp"
#include "attention/tokens/cost.hpp"
#include "base/failpoint.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/common/digest.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kName = "conv1d_backward";
constexpr std::string_view kInitial = "dconv_state";

}  // namespace

std::string_view Conv1dBackwardOpJob::op() const { return kName; }

std::string Conv1dBackwardOpJob::describe() const {
  SsmJob forward = input_.forward().job();
  forward.final_halos = false;  // only a check of the forward requests them
  return "backward of " + ringattn::describe(forward);
}

InputShape Conv1dBackwardOpJob::shape() const {
  InputShape shape = SsmOpJob(input_.forward()).shape();
  shape["op"] = std::string(kName);
  return shape;
}

double Conv1dBackwardOpJob::flops() const {
  return conv1d_backward_token_flops(spec()) * static_cast<double>(input_.forward().job().tokens());
}

std::int64_t Conv1dBackwardOpJob::result_rows() const { return input_.forward().job().tokens() * spec().channels; }

void Conv1dBackwardOpJob::write_job(JsonWriter& json) const {
  json.begin_object().member("dtype", dtype_name(spec().dtype)).member("channels", spec().channels);
  json.member("bias", spec().bias).member("silu", spec().silu).member("conv_width", spec().width);
  json.member("initial_states", input_.job().initial_halos).member("sequences", std::ssize(input_.job().lengths));
  json.member("tokens", input_.forward().job().tokens()).end_object();
}

void Conv1dBackwardOpJob::prepare(Transport& world, const Options& options) {
  world_ = &world;
  options_ = {options.kernel, {}, options.threads, options.timeout_seconds};
  const Collective collective(world, Timeouts(options_.timeout_seconds));
  if (options_.threads == 0) options_.threads = default_host_threads(collective);
  const auto plan_at = [&](double rate) { return plan_conv1d_backward(input_.job(), {}, world.size(), rate); };
  collective.run_collectively([&] { check_budget(plan_at(1.0).max_memory(), options.memory_budget); });
  backward_.emplace(input_.job(), world, options_);
  plan_.emplace(plan_at(kernel().flops_per_second(backend())));
}

PlanFigures Conv1dBackwardOpJob::plan(const Collective&) {
  PlanFigures figures;
  figures.blocks = std::ssize(backward_->layout().owners());
  figures.layout = layout_name(LayoutKind::kContiguous);
  figures.stripe = kSuperSegmentTokens;
  figures.bytes_moved = plan_->bytes_moved();
  figures.memory_per_rank = plan_->max_memory().total();
  figures.estimated_seconds = plan_->seconds;
  return figures;
}

void Conv1dBackwardOpJob::write_plan(JsonWriter& json) { write_memory(json, plan_->max_memory()); }

std::string Conv1dBackwardOpJob::sent_text(std::int64_t bytes) const {
  return fmt::format("{} of tokens around runs and of weights' gradients sent",
                     format_bytes(static_cast<double>(bytes)));
}

// x, dy and dx.
double Conv1dBackwardOpJob::token_bytes() const { return 3.0 * static_cast<double>(conv1d_row_bytes(spec())); }

RankFigures Conv1dBackwardOpJob::figures(const SsmStats& stats, std::int64_t tokens) const {
  RankFigures mine;
  mine.seconds = stats.seconds;
  mine.flops = conv1d_backward_token_flops(spec()) * static_cast<double>(tokens);
  mine.memory_planned = plan_->max_memory().total();
  mine.tokens = tokens;
  mine.bytes_received = plan_->received[static_cast<std::size_t>(world_->rank())];
  return mine;
}

std::vector<ResultDigest> digest_gradients(const Conv1dBackwardInput& input, const Conv1dBackwardRankResult& result,
                                           const Collective& collective) {
  const CausalConv1dSpec& spec = input.spec();
  std::vector<ResultDigest> digests;
  const auto add = [&](std::string_view name, const TensorView& view, std::span<const PackedRun> runs,
                       std::int64_t tokens) {
    digests.push_back({std::string(name), std::string(name), digest(collective, view, runs, tokens)});
  };
  add("dx", result.dx_view(spec), result.runs, input.forward().job().tokens());
  // A row of each channel, which rank 0 provides.
  const PackedRun rows{0, collective.rank() == 0 ? spec.channels : 0};
  const auto add_weights = [&](std::string_view name, const std::vector<float>& values, std::int64_t dim) {
    add(name, dense_view(static_cast<const void*>(values.data()), Dtype::kF32, rows.tokens(), 1, dim),
        {&rows, rows.tokens() > 0 ? 1U : 0U}, spec.channels);
  };
  add_weights("dweight", result.dweight, spec.width);
  if (spec.bias) add_weights("dbias", result.dbias, 1);
  if (input.job().initial_halos) {
    add(kInitial, result.dinitial_view(spec), result.sequences, std::ssize(input.job().lengths));
  }
  return digests;
}

RowGrid Conv1dBackwardOpJob::halos_grid() const {
  return {AxisOrder::kThd, 1, std::ssize(input_.job().lengths), spec().channels, spec().halo_tokens()};
}

std::vector<OutputTensor> Conv1dBackwardOpJob::gradients() const {
  std::vector<OutputTensor> tensors{{"dx", file_dtype(spec().dtype), input_.forward().y_shape()},
                                    {"dweight", FileDtype::kF32, {spec().channels, spec().width}}};
  if (spec().bias) tensors.push_back({"dbias", FileDtype::kF32, {spec().channels}});
  if (input_.job().initial_halos) {
    tensors.push_back({std::string(kInitial), file_dtype(spec().dtype), input_.forward().halos_shape()});
  }
  return tensors;
}

void Conv1dBackwardOpJob::write(const OutputRequest& output) {
  const Collective collective(*world_, Timeouts(options_.timeout_seconds));
  const FileMetadata metadata = file_metadata(collective, {}, output.metadata);
  write_collectively(collective, gradients(), metadata, output.path, output.replace, [&](SafetensorsWriter& writer) {
    writer.write_rows("dx", input_.forward().y_grid(), result_->runs, result_->dx_view(spec()));
    failpoint("writing");
    if (collective.rank() == 0) {
      writer.write_bytes("dweight", std::as_bytes(std::span(result_->dweight)));
      if (spec().bias) writer.write_bytes("dbias", std::as_bytes(std::span(result_->dbias)));
    }
    if (!input_.job().initial_halos) return;
    writer.write_rows(kInitial, halos_grid(), result_->sequences, result_->dinitial_view(spec()));
  });
}

std::vector<Cell> Conv1dBackwardOpJob::columns(const Totals& totals) const {
  const auto tokens = static_cast<double>(input_.forward().job().tokens());
  return {{"tokens", "", fmt::format("{}", input_.forward().job().tokens())},
          {"seqs", "", fmt::format("{}", input_.job().lengths.size())},
          {"channels", "", fmt::format("{}", spec().channels)},
          {"width", "", fmt::format("{}", spec().width)},
          {"dtype", "", std::string(dtype_name(spec().dtype))},
          {"time", "(ms)", fmt::format("{:.3f}", totals.seconds * 1e3)},
          {"Mtokens/s", "", fmt::format("{:.3f}", totals.seconds > 0.0 ? tokens / totals.seconds * 1e-6 : 0.0)},
          {"mem/rank", "(MiB)", fmt::format("{:.1f}", static_cast<double>(totals.memory_peak) / 0x1p20)},
          {"digest of dx", "", totals.digests->front().hex}};
}

std::string Conv1dBackwardOpJob::non_finite_text(const NonFinite& total) const {
  return fmt::format("{} values of x and dy", total.total());
}

Golden Conv1dBackwardOpJob::golden() {
  Golden golden = golden_of(input_.forward(), kernel().name, identity_of(kernel(), backend()));
  golden.job = "gradients of " + golden.job;
  return golden;
}

BenchJob Conv1dBackwardOpJob::bench_job(std::string source) const {
  BenchJob result = SsmOpJob(input_.forward()).bench_job(std::move(source));
  result.op = std::string(kName);
  return result;
}

}  // namespace ringattn
