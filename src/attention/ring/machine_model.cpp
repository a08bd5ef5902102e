// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/machine_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "attention/tokens/job.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "base/quotes.hpp"
#include "base/text_file.hpp"
#include "io/flat_table.hpp"

namespace ringattn {

namespace {

struct Member {
  std::string_view name;
  double MachineModel::*value;
  bool may_be_zero = false;
  bool optional = false;
};

constexpr Member kMembers[] = {
    {"flops_per_second", &MachineModel::flops_per_second},
    {"link_bytes_per_second", &MachineModel::link_bytes_per_second},
    {"latency_seconds", &MachineModel::latency_seconds, /*may_be_zero=*/true},
    {"fp32_flops_per_second", &MachineModel::fp32_flops_per_second, false, true},
    {"memory_bytes_per_second", &MachineModel::memory_bytes_per_second, false, true},
    {"thread_flops_per_second", &MachineModel::thread_flops_per_second, false, true},
    {"thread_fp32_flops_per_second", &MachineModel::thread_fp32_flops_per_second, false, true},
    {"thread_memory_bytes_per_second", &MachineModel::thread_memory_bytes_per_second, false, true},
    {"region_seconds", &MachineModel::region_seconds, false, true}};

struct TextMember {
  std::string_view name;
  std::string MachineModel::*value;
};

// Tokens of the job that is measured (ops/jobs/measure.hpp). Their number depends on the rate: in the time that is
// measured, one thread of a Xeon computes half as many, and 16 threads twice as many.
constexpr std::int64_t kMeasuredTokens = 16384;

constexpr TextMember kTexts[] = {{"name", &MachineModel::name}, {"kernel", &MachineModel::kernel}};

bool is_written(const Member& member, const MachineModel& machine) {
  return !member.optional || machine.*member.value > 0.0;
}

MessageTemplate how_to_make_one() { return {command("info", "measure"), " writes one."}; }

bool is_toml(std::string_view path) { return path.ends_with(".toml"); }

void take_member(MachineModel& machine, const Member& member, const FlatEntry& entry, const std::string& path) {
  double value = 0.0;
  const char* end = entry.text.data() + entry.text.size();
  const bool number = (entry.kind == FlatKind::kReal || entry.kind == FlatKind::kInteger) &&
                      std::from_chars(entry.text.data(), end, value).ptr == end;
  if (!number || !std::isfinite(value) || value < 0.0 || (value == 0.0 && !member.may_be_zero)) {
    fail(ErrorCode::kFile, fmt::format("{} is not a machine model", path),
         fmt::format("{} is {}, and must be a {} number", member.name, shortened(entry.text),
                     member.may_be_zero ? "non-negative" : "positive"),
         how_to_make_one());
  }
  machine.*member.value = value;
}

}  // namespace

AttentionSpec measured_spec(Dtype dtype) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.heads = 8;
  spec.kv_heads = 2;
  spec.softmax_scale = 0.088F;
  return spec;
}

MachineModel default_machine(const KernelEntry& kernel, double flops_per_second) {
  MachineModel machine;
  if (kernel.backend == "cuda") machine = {"default GPU", 0.0, 2.5e11, 1.5e-5};  // NVLink of an H200, rounded down
  machine.flops_per_second = flops_per_second;
  machine.of_job = true;
  return machine;
}

MachineModel default_machine(const KernelEntry& kernel, const Backend& backend) {
  return default_machine(kernel, kernel.flops_per_second(backend));
}

double machine_factor(const MachineModel& given, const KernelEntry& kernel, Dtype dtype, const Backend& backend) {
  if (given.of_job || given == MachineModel{}) return 1.0;
  const bool fp32 = dtype == Dtype::kF32 && given.fp32_flops_per_second > 0.0;
  const AttentionSpec spec = measured_spec(fp32 ? Dtype::kF32 : Dtype::kBf16);
  const AttentionRow* measured = nullptr;
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    if (row.backend != kernel.backend || !row.missing(spec).empty()) continue;
    if (measured == nullptr || row.name == given.kernel) measured = &row;
  }
  if (measured == nullptr) return 1.0;
  return (fp32 ? given.fp32_flops_per_second : given.flops_per_second) / measured->speed(spec, backend);
}

HostRates host_rates(const MachineModel& given, int threads) {
  HostRates rates = default_host_rates(threads);
  if (given.of_job || given == MachineModel{}) return rates;
  // What was not measured of one thread is in the default proportion to what was measured of all.
  const auto take = [](HostRate& rate, double one, double all, double unit) {
    if (all <= 0.0) return;
    const double part = rate.one / rate.all;
    rate.all = all / unit;
    rate.one = one > 0.0 ? one / unit : rate.all * part;
  };
  const auto attention = std::ranges::find(kernel_table<AttentionSpec>(), "cpu_attention", &AttentionRow::name);
  const auto backend = attention->make_backend({threads, kNoDevice});
  // Rates of one core in the job that was measured, with the time that its threads lose at the end.
  constexpr double kNoWait = 1e30;  // bytes a second
  const auto unit = [&](Dtype dtype) {
    const HostWork work = attention->host_work(measured_spec(dtype), *backend, kMeasuredTokens);
    const HostRate core{1.0, 1.0};
    return work.flops / host_seconds(work, {core, core, {kNoWait, kNoWait}, 0.0});
  };
  const bool fp32 = given.fp32_flops_per_second > 0.0;
  take(rates.vector, fp32 ? given.thread_fp32_flops_per_second : given.thread_flops_per_second,
       fp32 ? given.fp32_flops_per_second : given.flops_per_second, unit(fp32 ? Dtype::kF32 : Dtype::kBf16));
  take(rates.amx, given.thread_flops_per_second, given.flops_per_second, unit(Dtype::kBf16));
  take(rates.memory, given.thread_memory_bytes_per_second, given.memory_bytes_per_second, 1.0);
  if (given.region_seconds > 0.0) rates.region_seconds = given.region_seconds;
  return rates;
}

MachineModel job_machine(const MachineModel& given, const KernelEntry& kernel, double flops_per_second) {
  if (given == MachineModel{}) return default_machine(kernel, flops_per_second);
  MachineModel machine = given;
  if (!given.of_job) machine.flops_per_second = flops_per_second;
  machine.of_job = true;
  return machine;
}

MachineModel job_machine(const MachineModel& given, const AttentionRow& kernel, const AttentionSpec& spec,
                         const Backend& backend, std::int64_t tokens) {
  return job_machine(given, kernel, machine_speed(given, kernel, spec, spec.dtype, backend, tokens));
}

std::int64_t tokens_of_rank(const Batch& batch, int world) { return (batch.q_tokens() + world - 1) / world; }

MachineModel parse_machine_model(std::string_view text, const std::string& path) {
  MachineModel machine;
  machine.name.clear();
  bool seen[std::size(kMembers)] = {};
  const auto entries = is_toml(path) ? parse_toml_table(text, path, ErrorCode::kFile, how_to_make_one())
                                     : parse_json_table(text, path, ErrorCode::kFile, how_to_make_one());
  for (const FlatEntry& entry : entries) {
    bool known = false;
    for (const TextMember& member : kTexts) {
      if (entry.key != member.name) continue;
      if (entry.kind != FlatKind::kText) {
        fail(ErrorCode::kFile, fmt::format("{} is not a machine model", path),
             fmt::format("{} is {}, and must be a text", member.name, shortened(entry.text)), how_to_make_one());
      }
      machine.*member.value = entry.text;
      known = true;
    }
    for (std::size_t i = 0; i < std::size(kMembers); ++i) {
      if (entry.key != kMembers[i].name) continue;
      take_member(machine, kMembers[i], entry, path);
      seen[i] = known = true;
    }
    if (!known) {
      fail(ErrorCode::kFile, fmt::format("{} is not a machine model", path),
           fmt::format("it names {}", shortened(entry.key)), how_to_make_one());
    }
  }
  for (std::size_t i = 0; i < std::size(kMembers); ++i) {
    if (!seen[i] && !kMembers[i].optional) {
      fail(ErrorCode::kFile, fmt::format("{} is not a machine model", path),
           fmt::format("{} is missing", kMembers[i].name), how_to_make_one());
    }
  }
  if (machine.name.empty()) machine.name = path;
  return machine;
}

MachineModel read_machine_model(const std::string& path) { return parse_machine_model(read_text_file(path), path); }

std::string machine_model_text(const MachineModel& machine, std::string_view path) {
  if (!is_toml(path)) {
    JsonWriter json;
    json.begin_object();
    for (const TextMember& member : kTexts) {
      if (!(machine.*member.value).empty()) json.member(member.name, machine.*member.value);
    }
    for (const Member& member : kMembers) {
      if (is_written(member, machine)) json.member(member.name, machine.*member.value);
    }
    return json.end_object().text();
  }
  std::string toml;
  for (const TextMember& member : kTexts) {
    const std::string& text = machine.*member.value;
    if (!text.empty()) toml += fmt::format("{} = {}\n", member.name, toml_quoted(text));
  }
  for (const Member& member : kMembers) {
    if (is_written(member, machine)) toml += fmt::format("{} = {}\n", member.name, machine.*member.value);
  }
  return toml;
}

}  // namespace ringattn
