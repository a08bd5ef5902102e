// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm_op_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/tokens/cost.hpp"
#include "base/error.hpp"
#include "base/failpoint.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/jobs/model_comparison.hpp"

namespace ringattn {

namespace {

constexpr double kDecayTolerance = 1e-2;  // of a decay, which files may have in bf16

bool all_equal(const std::vector<std::int64_t>& lengths) {
  return std::ranges::all_of(lengths, [&](std::int64_t length) { return length == lengths.front(); });
}

// "; 3 states, 1.5 MiB sent". Empty if ranks send each other nothing.
std::string sent_text(const SsmJob& job, std::int64_t bytes) {
  const auto count = static_cast<std::uint64_t>(bytes / carried_bytes(job));
  if (count == 0) return "";
  const std::string what = job.conv1d_only
                               ? counted(count * static_cast<std::uint64_t>(job.convolution->halo_tokens()), "token")
                               : counted(count, "state");
  return fmt::format("; {}, {} sent", what, format_bytes(static_cast<double>(bytes)));
}

}  // namespace

void write_ssm_spec(JsonWriter& json, const SsmSpec& spec) {
  json.member("dtype", dtype_name(spec.dtype)).member("heads", spec.heads).member("head_dim", spec.head_dim);
  json.member("state_dim", spec.state_dim).member("groups", spec.groups);
  if (spec.decay != SsmDecay::kDt) {
    constexpr std::string_view kDecays[] = {"", "head", "token", "dim"};
    json.member("decay", kDecays[static_cast<std::size_t>(spec.decay)]);
    json.member("scale", static_cast<double>(spec.scale));
    return;
  }
  json.member("skip", spec.skip);
  json.member("gate", spec.gate).member("dt_bias", spec.dt_bias).member("dt_softplus", spec.dt_softplus);
  json.member("dt_min", static_cast<double>(spec.dt_min)).member("dt_max", static_cast<double>(spec.dt_max));
}

SsmOptions ssm_options(const Options& options, bool timeline) {
  SsmOptions ssm;
  ssm.kernel = options.kernel;
  ssm.memory_budget = options.memory_budget;
  ssm.threads = options.threads;
  ssm.timeout_seconds = options.timeout_seconds;
  ssm.timeline = timeline;
  return ssm;
}

void write_memory(JsonWriter& json, const SsmMemory& memory) {
  json.key("memory").begin_object().member("rows", memory.rows).member("states", memory.states);
  json.member("scratch", memory.scratch).member("exchange", memory.exchange).end_object();
}

InputShape SsmOpJob::shape() const {
  const SsmJob& job = input_.job();
  const SsmSpec& spec = job.spec;
  InputShape shape{{"op", std::string(op())},
                   {"dtype", std::string(dtype_name(spec.dtype))},
                   {"heads", fmt::format("{}", spec.heads)},
                   {"batch", fmt::format("{}", job.lengths.size())}};
  const bool linear = spec.decay != SsmDecay::kDt;
  if (!job.conv1d_only && !linear) {
    shape["state-dim"] = fmt::format("{}", spec.state_dim);
    shape["groups"] = fmt::format("{}", spec.groups);
  }
  if (!spec.state_decays) shape["head-dim"] = fmt::format("{}", linear ? spec.state_dim : spec.head_dim);
  if (linear) shape["head-dim-v"] = fmt::format("{}", spec.head_dim);
  if (job.update) {
    shape.emplace("q-len", fmt::format("{}", job.lengths.front()));
  } else if (!job.lengths.empty() && all_equal(job.lengths)) {
    shape["seq"] = fmt::format("{}", job.lengths.front());
  }
  if (!linear) shape["conv-width"] = fmt::format("{}", job.convolution ? job.convolution->width : 0);
  return shape;
}

double SsmOpJob::flops() const {
  const SsmJob& job = input_.job();
  return ssm_token_flops(job) * static_cast<double>(job.tokens());
}

void SsmOpJob::write_job(JsonWriter& json) const {
  const SsmJob& job = input_.job();
  json.begin_object();
  if (job.conv1d_only) {
    const CausalConv1dSpec& spec = *job.convolution;
    json.member("dtype", dtype_name(spec.dtype)).member("channels", spec.channels).member("bias", spec.bias);
    json.member("silu", spec.silu);
  } else {
    write_ssm_spec(json, job.spec);
    json.member("update", job.update);
  }
  if (job.spec.decay == SsmDecay::kDt) {
    json.member("conv_width", job.convolution ? job.convolution->width : 0);
  } else {
    json.member("rope", job.rope.has_value());
  }
  json.member("initial_states", job.conv1d_only ? job.initial_halos : job.initial_states);
  json.member("final_states", job.conv1d_only ? job.final_halos : job.final_states);
  json.member("sequences", static_cast<std::int64_t>(job.lengths.size())).member("tokens", job.tokens()).end_object();
}

void SsmOpJob::prepare(Transport& world, const Options& options) {
  prepared_.emplace(input_, world, ssm_options(options, timeline_));
}

PlanFigures SsmOpJob::plan(const Collective& collective) {
  Ssm& ssm = prepared_->ssm();
  PlanFigures figures;
  figures.blocks = static_cast<std::int64_t>(ssm.layout().owners().size());
  figures.layout = layout_name(LayoutKind::kContiguous);
  figures.stripe = kSuperSegmentTokens;
  for (const std::int64_t bytes : collective.gather_values(ssm.bytes_received())) figures.bytes_moved += bytes;
  figures.memory_per_rank = ssm.memory().total();
  // A decode step is memory-bound, and kernels report only how fast they compute.
  if (!input_.job().update) figures.estimated_seconds = ssm.estimated_seconds();
  return figures;
}

void SsmOpJob::write_plan(JsonWriter& json) { write_memory(json, prepared_->ssm().memory()); }

std::vector<std::string> SsmOpJob::plan_lines(const PlanFigures& plan) {
  return {fmt::format("ranks: {} of whole super-segments{}, {} planned for a rank",
                      counted(static_cast<std::uint64_t>(plan.blocks), "run"),
                      sent_text(input_.job(), plan.bytes_moved),
                      format_bytes(static_cast<double>(plan.memory_per_rank)))};
}

RankFigures SsmOpJob::figures(const SsmRankResult& result) {
  Ssm& ssm = prepared_->ssm();
  RankFigures mine;
  mine.seconds = result.stats.seconds;
  mine.exposed_comm_seconds = result.stats.exposed_comm_seconds;
  mine.flops = ssm_token_flops(ssm.job()) * static_cast<double>(result.rows);
  mine.memory_planned = ssm.memory().total();
  mine.tokens = result.rows;
  mine.bytes_received = ssm.bytes_received();
  mine.non_finite.q = result.non_finite;
  return mine;
}

RankFigures SsmOpJob::run(const ProgressCallback& on_progress) {
  result_ = prepared_->compute(on_progress);
  return figures(result());
}

std::vector<ResultDigest> SsmOpJob::digests(const Collective& collective) {
  digests_ = digest_ssm(input_, result(), collective);
  return {{"out", std::string(rows_name(input_.job().spec)), digests_.y},
          {"lse", "lse", ""},
          {"final_states", std::string(carried_name(input_.job())), digests_.final_states}};
}

void SsmOpJob::write(const OutputRequest& output) {
  const SsmJob& job = input_.job();
  const SsmSpec& spec = job.spec;
  FileMetadata metadata = output_metadata(kernel(), identity_of(kernel(), backend()), {digests_.y, {}});
  std::erase_if(metadata, [](const auto& entry) { return entry.first == "digest.lse"; });
  metadata.emplace_back("op", std::string(op()));
  if (!digests_.final_states.empty()) {
    metadata.emplace_back(fmt::format("digest.{}", carried_name(job)), digests_.final_states);
  }
  const auto note = [&](const char* name, int value) { metadata.emplace_back(name, fmt::format("{}", value)); };
  if (job.conv1d_only) {
    note("channels", job.convolution->channels);
    note("width", job.convolution->width);
  } else {
    note("heads", spec.heads);
    note("head_dim", spec.head_dim);
    note("state_dim", spec.state_dim);
    note("groups", spec.groups);
  }
  metadata.insert(metadata.end(), output.metadata.begin(), output.metadata.end());
  const std::string rows(rows_name(spec));
  std::vector<OutputTensor> tensors{{rows, file_dtype(spec.dtype), input_.y_shape()}};
  if (job.final_states) tensors.push_back({"final_states", FileDtype::kF32, input_.states_shape()});
  if (job.final_halos) tensors.push_back({"final_conv_state", file_dtype(spec.dtype), input_.halos_shape()});
  const auto write = [&](SafetensorsWriter& writer) {
    writer.write_rows(rows, input_.y_grid(), result().runs, result().y_view(spec));
    failpoint("writing");
    const auto sequences = static_cast<std::int64_t>(job.lengths.size());
    if (job.final_states) {
      const RowGrid grid{AxisOrder::kThd, 1, sequences, spec.heads, std::int64_t{spec.head_dim} * spec.state_dim};
      writer.write_rows("final_states", grid, result().sequences, result().carried_view(job));
    }
    if (!job.final_halos) return;
    const CausalConv1dSpec& convolution = *job.convolution;
    const RowGrid grid{AxisOrder::kThd, 1, sequences, convolution.channels, convolution.halo_tokens()};
    writer.write_rows("final_conv_state", grid, result().sequences,
                      dense_view(static_cast<const void*>(result().halos.data()), convolution.dtype,
                                 total_tokens(result().sequences), convolution.channels, convolution.halo_tokens()));
  };
  write_collectively(prepared_->collective(), tensors, metadata, output.path, output.replace, write);
}

std::vector<Cell> SsmOpJob::columns(const Totals& totals) const {
  const SsmJob& job = input_.job();
  const SsmSpec& spec = job.spec;
  const auto tokens = static_cast<double>(job.tokens());
  const auto rate = [&](double amount) { return totals.seconds > 0.0 ? amount / totals.seconds : 0.0; };
  std::vector<Cell> cells{{"tokens", "", fmt::format("{}", job.tokens())},
                          {"seqs", "", fmt::format("{}", job.lengths.size())},
                          {spec.state_decays ? "channels" : "heads", "", fmt::format("{}", spec.heads)}};
  if (job.conv1d_only) {
    cells.push_back({"width", "", fmt::format("{}", job.convolution->width)});
  } else {
    cells.push_back({"dim", "", fmt::format("{}", spec.head_dim)});
    cells.push_back({"state", "", fmt::format("{}", spec.state_dim)});
    if (spec.decay == SsmDecay::kDt) cells.push_back({"groups", "", fmt::format("{}", spec.groups)});
  }
  cells.push_back({"dtype", "", std::string(dtype_name(spec.dtype))});
  cells.push_back({"time", "(ms)", fmt::format("{:.3f}", totals.seconds * 1e3)});
  cells.push_back({"Mtokens/s", "", fmt::format("{:.3f}", rate(tokens) * 1e-6)});
  cells.push_back({"GB/s", "all ranks",
                   fmt::format("{:.2f}", rate(tokens * static_cast<double>(prepared_->ssm().token_bytes())) * 1e-9)});
  if (!job.conv1d_only) {
    cells.push_back({"exposed comm", "(ms)", fmt::format("{:.3f}", totals.exposed_comm_seconds * 1e3)});
  }
  cells.push_back({"mem/rank", "(MiB)", fmt::format("{:.1f}", static_cast<double>(totals.memory_peak) / 0x1p20)});
  cells.push_back({fmt::format("digest of {}", rows_name(spec)), "", totals.digests->front().hex});
  return cells;
}

std::vector<std::string> SsmOpJob::result_lines(const std::vector<ResultDigest>& digests) const {
  const ResultDigest& states = digests.back();
  if (states.hex.empty()) return {};
  return {fmt::format("digest of {}: {}", states.title, states.hex)};
}

std::string SsmOpJob::non_finite_text(const NonFinite& total) const {
  return fmt::format("{} values of the rows", total.total());
}

void SsmOpJob::write_non_finite(JsonWriter& json, const NonFinite& total) const {
  json.begin_object().member("rows", total.q).end_object();
}

BenchJob SsmOpJob::bench_job(std::string source) const {
  const SsmJob& job = input_.job();
  const SsmSpec& spec = job.spec;
  BenchJob result{std::string(op()), BenchKind::kStream, job.tokens(), 0, std::ssize(job.lengths), {},
                  std::move(source)};
  if (result.batch > 0) result.seq = result.tokens / result.batch;
  // The operations besides the scan.
  std::string rest;
  if (spec.decay != SsmDecay::kDt) {
    const std::string text = ringattn::describe(spec);
    rest = text.substr(text.find("a decay"));
    if (job.rope) rest += ", RoPE";
    if (job.update) rest += ", update";
  } else if (job.conv1d_only) {
    const std::string text = ringattn::describe(*job.convolution);
    rest = text.substr(text.find("width"));
  } else {
    const std::string text = ringattn::describe(spec);
    const std::string groups = counted(static_cast<std::uint64_t>(spec.groups), "group");
    const std::size_t behind = text.find(groups) + groups.size();
    rest = behind < text.size() ? text.substr(behind + 2) : std::string("plain");
    if (job.convolution) rest += fmt::format(", convolution of width {}", job.convolution->width);
    if (job.update) rest += ", update";
  }
  result.members = {{"heads", spec.heads},
                    {"kv_heads", 0},
                    {"head_dim", spec.decay == SsmDecay::kDt ? spec.head_dim : spec.state_dim},
                    {"head_dim_v", spec.head_dim},
                    {"dtype", std::string(dtype_name(spec.dtype))},
                    {"mask", rest}};
  if (!job.conv1d_only) {
    result.members.emplace_back("state_dim", spec.state_dim);
    result.members.emplace_back("groups", spec.groups);
  }
  return result;
}

void SsmOpJob::check_model(const ModelComparison& compare) const {
  const SsmJob& job = input_.job();
  const ModelLayer& layer = compare.layer();
  const SsmSpec& spec = job.spec;
  if (spec.decay != SsmDecay::kDt) return check_linear_attention(compare);
  if (layer.kind == LayerKind::kLinearAttention) compare.refuse_kind(op(), layer_kind_name(layer.kind));
  if (!layer.is_ssm()) {
    compare.refuse_kind("an SSM", "no SSM: it has no state_size, mamba_d_state or ssm_state_size");
  }
  if (job.conv1d_only) {
    compare.parts("the number of channels", spec.heads, static_cast<int>(layer.conv_channels));
    compare.same("the convolution's width", job.convolution->width, layer.conv_width);
    return;
  }
  const bool channels = layer.kind == LayerKind::kSelectiveScan;
  if (channels != spec.state_decays) {
    compare.refuse_kind(spec.state_decays ? "an SSM of Mamba-1" : "an SSM of Mamba-2",
                        channels ? "Mamba-1" : "Mamba-2");
  }
  const int parts = compare.parts(channels ? "the number of channels" : "the number of heads", spec.heads, layer.heads);
  if (!channels) compare.same("the dim of a head", spec.head_dim, layer.head_dim);
  compare.same("the state's dim", spec.state_dim, layer.state_dim);
  compare.shared("the number of groups", spec.groups, layer.groups, parts);
  if (job.convolution) compare.same("the convolution's width", job.convolution->width, layer.conv_width);
}

// If there are fewer heads than in the model, they belong to a tensor-parallel rank, and it is not known which heads
// they are.
void SsmOpJob::check_linear_attention(const ModelComparison& compare) const {
  const ModelLayer& layer = compare.layer();
  const SsmSpec& spec = input_.job().spec;
  if (layer.kind != LayerKind::kLinearAttention) compare.refuse_kind(op(), layer_kind_name(layer.kind));
  compare.parts("the number of heads", spec.heads, layer.heads);
  compare.same("the dim of q and k", spec.state_dim, layer.head_dim);
  compare.same("the dim of v", spec.head_dim, layer.head_dim_v);
  if (spec.decay != SsmDecay::kHead || spec.heads != layer.heads) return;
  for (std::size_t head = 0; head < layer.log_decays.size(); ++head) {
    const double given = static_cast<double>(input_.a()[head]);
    if (std::abs(given - layer.log_decays[head]) <= kDecayTolerance * std::abs(layer.log_decays[head])) continue;
    fail(ErrorCode::kFile, fmt::format("log_decay of head {} is {:.6g}", head, given),
         fmt::format("the model's layer has {:.6g}", layer.log_decays[head]),
         "Give the layer that the file belongs to.");
  }
}

Measured SsmOpJob::measure(const MeasureRequest& request, const Collective& collective) {
  LoadedSsm loaded(input_, prepared_->ssm(), collective, request.on_progress);
  SsmStats last;
  const Samples samples = sample_ssm(
      collective, {request.samples, request.on_progress}, [&] { return loaded.run(); }, last);
  const SsmRankResult result = loaded.fetch(last);
  const Ssm& ssm = prepared_->ssm();
  const double bytes = static_cast<double>(ssm.job().tokens()) * static_cast<double>(ssm.token_bytes());
  return {{{false, samples, bytes}}, figures(result), digest_ssm(input_, result, collective).y};
}

std::vector<TraceEvent> SsmOpJob::timeline() const {
  std::vector<TraceEvent> events;
  for (const SsmPhase& phase : result().stats.parts) {
    events.push_back({static_cast<int>(phase.kind),
                      fmt::format("heads {} to {}", phase.heads.first, phase.heads.end() - 1), phase.begin, phase.end});
  }
  return events;
}

}  // namespace ringattn
