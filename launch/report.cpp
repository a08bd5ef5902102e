// SPDX-License-Identifier: Apache-2.0
#include "launch/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/build.hpp"
#include "base/environment.hpp"
#include "base/host.hpp"
#include "base/json_writer.hpp"
#include "launch/message_text.hpp"

namespace ringattn {

namespace {

constexpr int kSchema = 2;
constexpr std::string_view kReportedVariables[] = {"RINGATTN_", "NCCL_", "CUDA_VISIBLE_DEVICES", "OMP_"};

// The values of the flags. For flags of the shape, the values of the input's tensors.
void write_config(JsonWriter& json, const Config& config, const InputShape& shape) {
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

// The job's shape, whatever its source.
void write_job(JsonWriter& json, const Report& report) {
  if (report.job == nullptr) {
    json.key("op").null().key("job").null();
    return;
  }
  json.member("op", report.job->op()).key("job");
  report.job->write_job(json);
}

void write_plan(JsonWriter& json, const Report& report) {
  json.key("plan");
  if (!report.plan) {
    json.null();
    return;
  }
  const PlanFigures& plan = *report.plan;
  json.begin_object().member("blocks", plan.blocks).member("layout", plan.layout).member("stripe", plan.stripe);
  json.member("bytes_moved", plan.bytes_moved).member("memory_per_rank", plan.memory_per_rank);
  if (plan.estimated_seconds) {
    json.member("estimated_ms", *plan.estimated_seconds * 1e3);
  } else {
    json.key("estimated_ms").null();
  }
  report.job->write_plan(json);
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
  if (report.job->measures_exposed_comm()) {
    json.member("exposed_comm_ms", report.max_exposed_comm_seconds() * 1e3);
  } else {
    json.key("exposed_comm_ms").null();
  }
  json.member("memory_peak_bytes", report.memory_peak());
}

void write_digests(JsonWriter& json, const Report& report) {
  json.key("digest");
  if (report.digests.empty()) {
    json.null();
    return;
  }
  json.begin_object();
  for (const ResultDigest& digest : report.digests) {
    json.key(digest.key);
    if (digest.hex.empty()) {
      json.null();
    } else {
      json.value(digest.hex);
    }
  }
  json.end_object();
}

void write_non_finite(JsonWriter& json, const Report& report) {
  json.key("non_finite_inputs");
  if (report.figures.empty()) {
    json.null();
  } else {
    report.job->write_non_finite(json, report.non_finite());
  }
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
  return seconds > 0.0 ? job->flops() / seconds / std::max(1, ranks) : 0.0;
}

std::size_t Report::memory_peak() const {
  std::size_t most = 0;
  for (const RankFigures& rank : figures) most = std::max(most, rank.memory_peak);
  return most;
}

NonFinite Report::non_finite() const {
  NonFinite total;
  for (const RankFigures& rank : figures) total += rank.non_finite;
  return total;
}

void write_document_head(JsonWriter& json, std::string_view command, const Invocation& invocation,
                         const InputShape& shape) {
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
  write_document_head(json, report.command, *report.invocation,
                      report.job == nullptr ? InputShape() : report.job->shape());
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
  if (!report.plan) {
    json.key("kernel").null();
  } else {
    json.member("kernel", report.job->kernel().name).member("kernel_reason", report.job->kernel_reason());
  }
  write_plan(json, report);
  write_measurements(json, report);
  write_digests(json, report);
  write_non_finite(json, report);
  json.key("accuracy");
  if (report.accuracy) {
    report.accuracy(json);
  } else {
    json.null();
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
    // The caller prints `error`. A report that can't be written (because its file exists, say) does not matter beside
    // it.
  }
}

namespace {

void report_failure(Report& report, const Error& error, const Transport& world) noexcept {
  if (world.rank() != 0) return;
  try {
    report.error = error;
    if (error.location() == nullptr && error.code() != ErrorCode::kPeer) {
      report.error->set_location({world.rank(), host_name()});  // only this rank has failed
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
