// SPDX-License-Identifier: Apache-2.0
#include "launch/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/build.hpp"
#include "base/environment.hpp"
#include "base/host.hpp"
#include "base/json_writer.hpp"
#include "launch/file_shape.hpp"
#include "launch/message_text.hpp"

namespace ringattn {

namespace {

constexpr int kSchema = 2;
constexpr std::string_view kReportedVariables[] = {"RINGATTN_", "NCCL_", "CUDA_VISIBLE_DEVICES", "OMP_"};

// What a flag says, and of the flags of a shape what the input's tensors do.
void write_config(JsonWriter& json, const Config& config, const FileShape& shape) {
  json.key("config").begin_object();
  for (const ConfigValue& value : config.values) {
    json.key(value.row->name);
    const auto said = shape.find(value.row->name);
    const std::string text = !comes_from_input(config, value) ? value.text
                             : said != shape.end()            ? said->second
                                                              : std::string();
    std::int64_t number = 0;
    const char* end = text.data() + text.size();
    if (text.empty()) {
      json.null();
    } else if (value.row->kind == FlagKind::kSwitch) {
      json.value(text == "true");
    } else if (std::from_chars(text.data(), end, number).ptr == end && value.row->kind != FlagKind::kText) {
      json.value(number);
    } else {
      json.value(text);
    }
  }
  json.end_object();
  json.key("config_sources").begin_object();
  for (const ConfigValue& value : config.values) {
    if (comes_from_input(config, value) && shape.contains(value.row->name)) json.member(value.row->name, "input");
    if (value.source != Source::kDefault) json.member(value.row->name, source_name(value.source));
  }
  json.end_object();
}

void write_texts(JsonWriter& json, std::string_view name, const std::vector<std::string>& texts) {
  json.key(name).begin_array(true);
  for (const std::string& text : texts) json.value(text);
  json.end_array();
}

void write_ssm_job(JsonWriter& json, const SsmJob& job) {
  json.begin_object();
  if (job.conv1d_only) {
    const CausalConv1dSpec& spec = *job.convolution;
    json.member("dtype", dtype_name(spec.dtype)).member("channels", spec.channels).member("bias", spec.bias);
    json.member("silu", spec.silu);
  } else {
    write_ssm_spec(json, job.spec);
    json.member("update", job.update);
  }
  json.member("conv_width", job.convolution ? job.convolution->width : 0);
  json.member("initial_states", job.conv1d_only ? job.initial_halos : job.initial_states);
  json.member("final_states", job.conv1d_only ? job.final_halos : job.final_states);
  json.member("sequences", static_cast<std::int64_t>(job.lengths.size())).member("tokens", job.tokens()).end_object();
}

// The job itself, wherever its shape came from.
void write_job(JsonWriter& json, const Report& report) {
  const std::optional<Job>& job = report.job;
  if (!job && !report.ssm) {
    json.key("op").null().key("job").null();
    return;
  }
  json.member("op", op_name(report.op)).key("job");
  if (report.ssm) {
    write_ssm_job(json, *report.ssm);
    return;
  }
  const AttentionSpec& spec = job->spec;
  json.begin_object().member("dtype", dtype_name(spec.dtype)).member("heads", spec.heads);
  json.member("kv_heads", spec.kv_heads).member("head_dim", spec.head_dim).member("head_dim_v", spec.head_dim_v);
  json.member("mask", describe(spec.mask)).member("softmax_scale", static_cast<double>(spec.softmax_scale));
  json.member("softcap", static_cast<double>(spec.softcap)).member("sinks", spec.sinks);
  if (report.latents) {
    json.member("rope_dim", report.latents->rope_dim).member("latent_dim", report.latents->latent_dim);
  }
  json.member("sequences", static_cast<std::int64_t>(job->batch.sequences.size()));
  json.member("q_tokens", job->batch.q_tokens()).member("k_tokens", job->batch.k_tokens()).end_object();
}

void write_plan(JsonWriter& json, const std::optional<PlanFigures>& plan) {
  json.key("plan");
  if (!plan) {
    json.null();
    return;
  }
  json.begin_object().member("blocks", plan->blocks).member("layout", plan->layout).member("stripe", plan->stripe);
  json.member("bytes_moved", plan->bytes_moved).member("memory_per_rank", plan->memory_per_rank);
  if (plan->estimated_seconds) {
    json.member("estimated_ms", *plan->estimated_seconds * 1e3);
  } else {
    json.key("estimated_ms").null();
  }
  if (plan->memory) {
    json.member("bytes_read", plan->bytes_read);
    write_memory(json, *plan->memory);
  }
  if (!plan->form.empty()) json.member("form", plan->form);
  if (plan->latents) {
    json.member("heads_at_a_time", plan->latents->heads_at_a_time);
    json.member("bytes_moved_expanded", plan->latents->bytes_moved_expanded);
  }
  if (plan->ssm_memory) write_memory(json, *plan->ssm_memory);
  json.end_object();
}

void write_measurements(JsonWriter& json, const Report& report) {
  if (report.figures.empty()) {
    for (const char* name : {"samples_ms", "time_ms", "tflops_per_rank", "exposed_comm_ms", "memory_peak_bytes"}) {
      json.key(name).null();
    }
    return;
  }
  json.key("samples_ms").begin_array(true).begin_array(true);  // one repetition
  for (const RankFigures& rank : report.figures) json.value(rank.seconds * 1e3);
  json.end_array().end_array();
  const double milliseconds = report.slowest_seconds() * 1e3;
  json.key("time_ms").begin_object();
  for (const char* name : {"median", "p10", "p90"}) json.member(name, milliseconds);
  json.end_object();
  json.member("tflops_per_rank", report.flops_per_second_per_rank() / 1e12);
  if (!report.plan || !report.plan->memory) {
    json.member("exposed_comm_ms", report.max_exposed_comm_seconds() * 1e3);
  } else {
    json.key("exposed_comm_ms").null();  // decode doesn't measure it
  }
  json.member("memory_peak_bytes", report.memory_peak());
}

void write_accuracy(JsonWriter& json, const std::optional<Accuracy>& accuracy) {
  json.key("accuracy");
  if (!accuracy) {
    json.null();
    return;
  }
  const auto write = [&](std::string_view tensor, bool compared, double error, double allowed, const RowSample& row) {
    json.key(tensor);
    if (!compared) {
      json.null();
      return;
    }
    json.begin_object().member("greatest_error", error).member("allowed", allowed).member("token", row.token);
    json.member("head", row.head).end_object();
  };
  json.begin_object().member("rows", accuracy->rows);
  write("out", accuracy->compared > 0, accuracy->error, accuracy->allowed(), accuracy->worst);
  write("lse", accuracy->lse_allowed > 0.0, accuracy->lse_error * accuracy->lse_allowed, accuracy->lse_allowed,
        accuracy->worst_lse);
  json.member("misplaced", accuracy->misplaced).end_object();
}

void write_accuracy(JsonWriter& json, const SsmAccuracy& accuracy) {
  json.key("accuracy").begin_object().member("rows", accuracy.rows).key("out");
  if (accuracy.compared == 0) {
    json.null();
  } else {
    json.begin_object().member("greatest_error", accuracy.error).member("allowed", accuracy.allowed);
    json.member("token", accuracy.worst.token).member("head", accuracy.worst.head).end_object();
  }
  const StateAccuracy& states = accuracy.states;
  json.key("lse").null().key("final_states");
  if (states.compared == 0) {
    json.null();
  } else {
    json.begin_object().member("greatest_error", states.error).member("allowed", states.allowed);
    json.member("sequence", states.sequence).member("head", states.head).end_object();
  }
  json.member("misplaced", accuracy.misplaced + states.misplaced).end_object();
}

void write_digests(JsonWriter& json, const Report& report) {
  json.key("digest");
  if (report.digests) {
    json.begin_object().member("out", report.digests->out).member("lse", report.digests->lse).end_object();
  } else if (report.ssm_digests) {
    json.begin_object().member("out", report.ssm_digests->y).key("lse").null().key("final_states");
    if (report.ssm_digests->final_states.empty()) {
      json.null();
    } else {
      json.value(report.ssm_digests->final_states);
    }
    json.end_object();
  } else {
    json.null();
  }
}

void write_non_finite(JsonWriter& json, const Report& report) {
  json.key("non_finite_inputs");
  if (report.figures.empty()) {
    json.null();
    return;
  }
  const NonFinite non_finite = report.non_finite();
  json.begin_object();
  if (report.ssm) {
    json.member("rows", non_finite.q);
  } else {
    json.member("q", non_finite.q).member("k", non_finite.k).member("v", non_finite.v);
  }
  json.end_object();
}

}  // namespace

double Report::slowest_seconds() const {
  double most = 0.0;
  for (const RankFigures& rank : figures) most = std::max(most, rank.seconds);
  return most;
}

double Report::max_exposed_comm_seconds() const {
  double most = 0.0;
  for (const RankFigures& rank : figures) most = std::max(most, rank.exposed_comm_seconds);
  return most;
}

double Report::flops_per_second_per_rank() const {
  const double seconds = slowest_seconds();
  return seconds > 0.0 ? flops / seconds / std::max(1, ranks) : 0.0;
}

std::size_t Report::memory_peak() const {
  std::size_t most = 0;
  for (const RankFigures& rank : figures) most = std::max(most, rank.memory_peak);
  return most;
}

NonFinite Report::non_finite() const {
  NonFinite total;
  for (const RankFigures& rank : figures) {
    total.q += rank.non_finite.q;
    total.k += rank.non_finite.k;
    total.v += rank.non_finite.v;
  }
  return total;
}

void write_memory(JsonWriter& json, const DecodeMemory& memory) {
  json.key("memory").begin_object().member("cache", memory.cache).member("tables", memory.tables);
  json.member("rows", memory.rows).member("scratch", memory.scratch).member("partials", memory.partials).end_object();
}

void write_memory(JsonWriter& json, const SsmMemory& memory) {
  json.key("memory").begin_object().member("rows", memory.rows).member("states", memory.states);
  json.member("scratch", memory.scratch).member("exchange", memory.exchange).end_object();
}

void write_ssm_spec(JsonWriter& json, const SsmSpec& spec) {
  json.member("dtype", dtype_name(spec.dtype)).member("heads", spec.heads).member("head_dim", spec.head_dim);
  json.member("state_dim", spec.state_dim).member("groups", spec.groups).member("skip", spec.skip);
  json.member("gate", spec.gate).member("dt_bias", spec.dt_bias).member("dt_softplus", spec.dt_softplus);
  json.member("dt_min", static_cast<double>(spec.dt_min)).member("dt_max", static_cast<double>(spec.dt_max));
}

void write_document_head(JsonWriter& json, std::string_view command, const Invocation& invocation,
                         const FileShape& shape) {
  json.member("schema", kSchema).member("command", command);
  json.key("tool").begin_object();
  json.member("version", version()).member("git", git_revision()).member("dirty", git_dirty());
  json.member("build_id", build_id()).end_object();
  write_texts(json, "argv", invocation.arguments);
  write_config(json, invocation.config, shape);
  json.key("environment").begin_object();
  for (const EnvironmentEntry& entry : environment_entries(kReportedVariables)) json.member(entry.name, entry.value);
  json.end_object();
}

std::string report_text(const Report& report) {
  JsonWriter json;
  json.begin_object();
  FileShape shape;
  if (report.ssm) shape = file_shape(*report.ssm);
  if (report.job) shape = file_shape(report.op, *report.job, report.latents ? &*report.latents : nullptr);
  write_document_head(json, report.command, *report.invocation, shape);
  if (report.ranks == 0) {
    json.key("world").null();
  } else {
    json.key("world").begin_object().member("ranks", report.ranks).member("transport", report.transport);
    json.member("transport_reason", report.invocation->transport_reason);
    write_texts(json, "hosts", report.hosts);
    write_texts(json, "devices", report.devices);
    json.end_object();
  }
  write_job(json, report);
  if (report.kernel.empty()) {
    json.key("kernel").null();
  } else {
    json.member("kernel", report.kernel).member("kernel_reason", report.kernel_reason);
  }
  write_plan(json, report.plan);
  write_measurements(json, report);
  write_digests(json, report);
  write_non_finite(json, report);
  if (report.ssm_accuracy) {
    write_accuracy(json, *report.ssm_accuracy);
  } else {
    write_accuracy(json, report.accuracy);
  }
  if (report.verdict.empty()) {
    json.key("verdict").null();
  } else {
    json.member("verdict", report.verdict);
  }
  if (report.error) {
    json.key("error").begin_object().member("code", static_cast<int>(report.error->code()));
    json.member("name", error_name(report.error->code()))
        .member("message", program_text(*report.error, report.invocation->config));
    const ErrorLocation* const location = report.error->location();
    if (location == nullptr) {
      json.key("rank").null().key("host").null();
    } else {
      json.member("rank", location->rank).member("host", location->host);
    }
    json.end_object();
  } else {
    json.key("error").null();
  }
  return json.end_object().text();
}

void write_report(const Report& report) {
  const ReportFile& file = *report.invocation->report_file;
  if (file.wanted()) file.write(report_text(report));
}

std::string unfinished_report_text(const Invocation& invocation, std::string_view command) {
  Report report;
  report.command = command;
  report.invocation = &invocation;
  report.verdict = "unfinished";
  report.error.emplace(
      ErrorCode::kPeer, "the job has not told its end",
      "it is at work still, or its process ended before it could report",
      "Where it isn't running any more, see what ended it: a signal, the system for want of memory, or "
      "another rank.");
  return report_text(report);
}

void report_failure(const Invocation& invocation, std::string_view command, const Error& error) noexcept {
  try {
    Report report;
    report.command = command;
    report.invocation = &invocation;
    report.error = error;
    write_report(report);
  } catch (const std::exception&) {
    // The caller prints `error`; a report that can't be written (its file exists, say) is no news beside it.
  }
}

namespace {

void report_failure(Report& report, const Error& error, const Transport& world) noexcept {
  if (world.rank() != 0) return;
  try {
    report.error = error;
    if (error.location() == nullptr && error.code() != ErrorCode::kPeer) {
      report.error->set_location({world.rank(), host_name()});  // no other rank has failed
    }
    write_report(report);
  } catch (const std::exception&) {
    // As above.
  }
}

}  // namespace

int run_reported(std::string_view command, const Invocation& invocation, Transport& world,
                 const std::function<int(Report&)>& job) {
  Report report;
  report.command = command;
  report.invocation = &invocation;
  try {
    return job(report);
  } catch (const Error& error) {
    report_failure(report, error, world);
    throw;
  }
}

}  // namespace ringattn
