// SPDX-License-Identifier: Apache-2.0
// `ringattn info`: what this build and machine have, and why other things are missing.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/build.hpp"
#include "base/environment.hpp"
#include "base/gpu.hpp"
#include "base/host.hpp"
#include "base/json_writer.hpp"
#include "base/numa.hpp"
#include "base/size.hpp"
#include "base/text_file.hpp"
#include "comm/collective.hpp"
#include "comm/world.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/common/simd_target.hpp"
#include "launch/commands.hpp"
#include "launch/help.hpp"
#include "launch/job_request.hpp"
#include "launch/outputs.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "ops/jobs/measure.hpp"

namespace ringattn {

namespace {

struct DeviceInfo {
  std::string cpu = cpu_model();
  int processors = usable_processors().count;
  std::string host = host_name();
  std::string target;  // instruction set of the first kernel that runs here
  std::vector<std::string> simd_targets = simd_target_names_here();
};

// The NUMA nodes, and whether ranks that share this host are bound to them.
std::string numa_text(const JobOptions& options) {
  const NumaTopology nodes = read_numa_topology();
  std::string text;
  for (const CpuList& node : nodes) text += fmt::format("{}{}", text.empty() ? "" : " | ", cpu_list_text(node));
  if (text.empty()) text = "not known";
  if (!options.bind_to_numa_node) return text + "; ranks are not bound (--numa-binding none)";
  if (const std::string_view variable = openmp_binding(); !variable.empty()) {
    return fmt::format("{}; ranks are not bound ({} is set)", text, variable);
  }
  const NumaPlacement placement = place_on_numa_nodes(nodes, usable_cpus(), static_cast<int>(nodes.size()));
  if (placement.cpus.empty()) return fmt::format("{}; ranks are not bound ({})", text, placement.reason);
  return text + "; ranks that share this host are bound to nodes";
}

DeviceInfo find_device(const JobOptions& options) {
  DeviceInfo device;
  for (const auto& [op, row] : all_kernels()) {
    if (row->backend == "cpu" && row->unavailable().empty()) {
      device.target = row->make_backend({std::max(1, options.threads)})->identity();
      break;
    }
  }
  return device;
}

std::vector<std::string> configs_of(const KernelEntry& kernel) {
  return kernel.configs == nullptr ? std::vector<std::string>() : kernel.configs();
}

std::string state_of(const std::string& obstacle) { return obstacle.empty() ? "yes" : "no"; }

// Every environment variable that is read: those of the runtime, then the variables of flags that are set.
struct VariableInfo {
  std::string name;
  std::string value;
  bool set = false;
  std::string meaning;
};

std::vector<VariableInfo> variables() {
  std::vector<VariableInfo> all;
  for (const EnvironmentVariable& row : environment_table()) {
    const auto value = environment_value(row.name);
    all.push_back({std::string(row.name), shown_value(row.name, value.value_or("")), value.has_value(),
                   fmt::format("{} ({})", row.meaning, row.accepts)});
  }
  std::string_view last;
  for (const FlagRow& row : flag_table()) {
    if (row.key() == last) continue;  // a flag with two rows, one for each kind of value
    last = row.key();
    const std::string name = environment_variable(row.key());
    const auto value = environment_value(name);
    all.push_back(
        {name, value.value_or(""), value.has_value(),
         fmt::format("as --{}{}", row.name, row.own_key.empty() ? "" : " of " + command_names(row.commands))});
  }
  return all;
}

void print_tables(const Screen& screen, const JobOptions& options, const DeviceInfo& device) {
  std::string text = version_line();
  text += fmt::format("build id    {}\n", build_id().empty() ? "none" : build_id());
  text += fmt::format("host        {}: {}, {} for this process\n", device.host, device.cpu,
                      counted(static_cast<std::uint64_t>(device.processors), "processor"));
  text += fmt::format("NUMA nodes  {}\n", numa_text(options));
  text += fmt::format("SIMD target {} (--simd-target {}; here: {})\n", device.target, simd_target(),
                      fmt::join(device.simd_targets, ", "));
  for (const Gpu& gpu : visible_gpus()) {
    text += fmt::format("GPU {:<7} {}, compute capability {}.{}, {} multiprocessors, {}\n", gpu.device, gpu.name,
                        gpu.compute_major, gpu.compute_minor, gpu.multiprocessors,
                        format_bytes(static_cast<double>(gpu.memory)));
  }
  if (visible_gpus().empty()) text += fmt::format("GPU         none ({})\n", gpus_unavailable());
  text += "\nkernels of each op in order of preference; mla uses those of batched_gemm and of attention or decode\n";
  std::size_t name_width = 0;
  std::size_t op_width = 0;
  for (const auto& [op, row] : all_kernels()) {
    name_width = std::max(name_width, row->name.size());
    op_width = std::max(op_width, op.size());
  }
  for (const auto& [op, row] : all_kernels()) {
    const std::string obstacle = row->unavailable();
    text += fmt::format("  {:<{}} {:<{}} {:<5} runs here: {}{}\n                   {}\n", row->name, name_width, op,
                        op_width, row->backend, state_of(obstacle),
                        obstacle.empty() ? "" : fmt::format(" ({})", obstacle), row->supports);
    if (!screen.verbose()) continue;
    for (const std::string& config : configs_of(*row)) text += fmt::format("                     {}\n", config);
  }
  text += "\ntransports\n";
  for (const TransportRow& row : transport_table()) {
    const std::string obstacle = row.unavailable();
    text += fmt::format("  {:<16} {:<5} runs here: {}{}\n                   {}\n", row.name, row.memory,
                        state_of(obstacle), obstacle.empty() ? "" : fmt::format(" ({})", obstacle), row.description);
  }
  text += "\nenvironment\n";
  for (const VariableInfo& variable : variables()) {
    const bool is_flag = variable.meaning.starts_with("as --");
    if (is_flag && !variable.set && !screen.verbose()) continue;
    text += fmt::format("  {} {}\n                   {}\n", variable.name,
                        variable.set ? fmt::format("= \"{}\" (environment)", variable.value) : "is not set",
                        variable.meaning);
  }
  text += fmt::format("  each flag of a job is also an environment variable, RINGATTN_ and its name in capitals{}\n",
                      screen.verbose() ? "" : "; --verbose lists them");
  screen.print(text);
}

std::string info_json(const Invocation& invocation, const DeviceInfo& device, const MachineModel* machine) {
  JsonWriter json;
  json.begin_object();
  write_document_head(json, "info", invocation);
  json.member("compiler", compiler()).member("build_type", build_type());
  json.key("device").begin_object().member("host", device.host).member("cpu", device.cpu);
  json.member("processors", device.processors).member("target", device.target);
  json.key("numa_nodes").begin_array();
  for (const CpuList& node : read_numa_topology()) json.value(cpu_list_text(node));
  json.end_array().member("simd_target", simd_target()).key("simd_targets").begin_array();
  for (const std::string& name : device.simd_targets) json.value(name);
  json.end_array().end_object();
  json.key("gpus").begin_array();
  for (const Gpu& gpu : visible_gpus()) {
    json.begin_object().member("device", gpu.device).member("name", gpu.name).member("uuid", gpu.uuid);
    json.member("compute_capability", fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor));
    json.member("multiprocessors", gpu.multiprocessors).member("memory_bytes", gpu.memory).end_object();
  }
  json.end_array().key("kernels").begin_array();
  for (const auto& [op, row] : all_kernels()) {
    const std::string obstacle = row->unavailable();
    json.begin_object()
        .member("name", row->name)
        .member("op", op)
        .member("backend", row->backend)
        .member("supports", row->supports);
    json.key("configs").begin_array();
    for (const std::string& config : configs_of(*row)) json.value(config);
    json.end_array();
    json.member("available", obstacle.empty()).member("reason", obstacle).end_object();
  }
  json.end_array().key("transports").begin_array();
  for (const TransportRow& row : transport_table()) {
    const std::string obstacle = row.unavailable();
    json.begin_object().member("name", row.name).member("memory", row.memory).member("description", row.description);
    json.member("available", obstacle.empty()).member("reason", obstacle).end_object();
  }
  json.end_array().key("variables").begin_array();
  for (const VariableInfo& variable : variables()) {
    json.begin_object().member("name", variable.name).key("value");
    if (variable.set) {
      json.value(variable.value);
    } else {
      json.null();
    }
    json.member("source", variable.set ? "environment" : "default").member("meaning", variable.meaning).end_object();
  }
  json.end_array().key("machine");
  if (machine == nullptr) {
    json.null();
  } else {
    json.begin_object().member("name", machine->name).member("flops_per_second", machine->flops_per_second);
    json.member("link_bytes_per_second", machine->link_bytes_per_second);
    json.member("latency_seconds", machine->latency_seconds);
    if (machine->fp32_flops_per_second > 0.0) json.member("fp32_flops_per_second", machine->fp32_flops_per_second);
    if (machine->memory_bytes_per_second > 0.0)
      json.member("memory_bytes_per_second", machine->memory_bytes_per_second);
    if (machine->thread_flops_per_second > 0.0) {
      json.member("thread_flops_per_second", machine->thread_flops_per_second);
      json.member("thread_fp32_flops_per_second", machine->thread_fp32_flops_per_second);
      json.member("thread_memory_bytes_per_second", machine->thread_memory_bytes_per_second);
      json.member("region_seconds", machine->region_seconds);
    }
    if (!machine->kernel.empty()) json.member("kernel", machine->kernel);
    json.end_object();
  }
  return json.key("error").null().end_object().text();
}

std::string machine_line(const MachineModel& machine) {
  std::string text = fmt::format("a rank has {:.4g} GFLOP/s", machine.flops_per_second / 1e9);
  if (machine.fp32_flops_per_second > 0.0) text += fmt::format(" (fp32 {:.4g})", machine.fp32_flops_per_second / 1e9);
  if (machine.memory_bytes_per_second > 0.0) {
    text += fmt::format(", reads {:.4g} GB/s of memory", machine.memory_bytes_per_second / 1e9);
  }
  if (machine.thread_flops_per_second > 0.0) {
    text +=
        fmt::format(", one thread {:.4g} GFLOP/s (fp32 {:.4g}) and {:.4g} GB/s", machine.thread_flops_per_second / 1e9,
                    machine.thread_fp32_flops_per_second / 1e9, machine.thread_memory_bytes_per_second / 1e9);
  }
  return text + fmt::format(", receives {:.4g} GB/s, latency {:.4g} us ({})", machine.link_bytes_per_second / 1e9,
                            machine.latency_seconds * 1e6, machine.name);
}

int measure_here(const Invocation& invocation, Transport& world) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const bool first = world.rank() == 0;
  const Screen screen(options, first);
  const Collective collective(world, Timeouts(options.timeout));
  collective.run_collectively([&] {
    if (!first) return;
    check_outputs(invocation);
    if (options.machine.empty()) return;
    if (!options.machine.ends_with(".json") && !options.machine.ends_with(".toml")) {
      fail(ErrorCode::kUsage, fmt::format("--machine {} names no machine model", options.machine),
           "it is written as JSON or as TOML, and the name's end says which", "End it with .json or .toml.");
    }
    check_new_file(options.machine, options.force, "machine");
  });
  Config without_model = config;  // --machine names the file to be written
  without_model.options.machine.clear();
  const MachineModel machine = measure_machine(library_options(without_model), world);
  collective.run_collectively([&] {
    if (!first) return;
    screen.context(fmt::format("measured: {}", machine_line(machine)));
    if (world.size() == 1) screen.context("one rank alone has no link: link rate and latency are the defaults");
    const std::string text = machine_model_text(machine, options.machine);
    if (options.machine.empty()) {
      screen.print(text);
    } else {
      write_text_file(options.machine, text, options.force, "machine");
      screen.context(fmt::format("machine model: {}", options.machine));
    }
    invocation.report_file->write(info_json(invocation, find_device(options), &machine));
  });
  return 0;
}

}  // namespace

int info_main(const Invocation& invocation, Transport* world) {
  if (world != nullptr) {
    return run_reported("info", invocation, *world, [&](Report&) { return measure_here(invocation, *world); });
  }
  const JobOptions& options = invocation.config.options;
  for (const std::string_view flag : {"ranks", "transport", "kernel", "backend", "timeout"}) {
    if (invocation.config.value(flag).source == Source::kFlag) {
      fail(ErrorCode::kUsage, fmt::format("--{} needs --measure", flag), "info alone starts no ranks and no kernel",
           "Add --measure, or leave it out.");
    }
  }
  const DeviceInfo device = find_device(options);
  std::optional<MachineModel> machine;
  if (!options.machine.empty()) machine = read_machine_model(options.machine);
  check_outputs(invocation);
  const Screen screen(options, true);
  print_tables(screen, options, device);
  if (machine) screen.print(fmt::format("\nmachine model\n  {}\n", machine_line(*machine)));
  invocation.report_file->write(info_json(invocation, device, machine ? &*machine : nullptr));
  return 0;
}

}  // namespace ringattn
