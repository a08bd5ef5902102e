// SPDX-License-Identifier: Apache-2.0
#include "ops/common/environment_facts.hpp"

#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <system_error>
#include <vector>

#if __has_include(<gnu/libc-version.h>)
#include <gnu/libc-version.h>
#endif

#include "base/build.hpp"
#include "base/environment.hpp"
#include "base/gpu.hpp"
#include "base/gpu_links.hpp"
#include "base/host.hpp"
#include "base/size.hpp"
#include "comm/mpi_handle.hpp"
#include "comm/nccl_version.hpp"
#include "comm/world.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

namespace fs = std::filesystem;

// Bytes of the UTF-8 character at the beginning of `text`; 0 if there is none, or if it is not printable.
std::size_t printable_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return byte(0) >= 0x20 && byte(0) != 0x7f ? 1 : 0;
  const std::size_t size = byte(0) >= 0xc2 && byte(0) < 0xe0   ? 2
                           : byte(0) >= 0xe0 && byte(0) < 0xf0 ? 3
                           : byte(0) >= 0xf0 && byte(0) < 0xf5 ? 4
                                                               : 0;
  if (size == 0 || text.size() < size) return 0;
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const bool control = size == 2 && byte(0) == 0xc2 && byte(1) < 0xa0;
  const bool overlong = (byte(0) == 0xe0 && byte(1) < 0xa0) || (byte(0) == 0xf0 && byte(1) < 0x90);
  const bool beyond = (byte(0) == 0xed && byte(1) >= 0xa0) || (byte(0) == 0xf4 && byte(1) >= 0x90);
  return control || overlong || beyond ? 0 : size;
}

// The first line of a small system file; empty if it can't be read.
std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string system_name() {
  std::ifstream file("/etc/os-release");
  for (std::string line; std::getline(file, line);) {
    constexpr std::string_view kName = "PRETTY_NAME=";
    if (!line.starts_with(kName)) continue;
    std::string name = line.substr(kName.size());
    std::erase(name, '"');
    return name;
  }
  return "unknown (/etc/os-release has no PRETTY_NAME)";
}

std::string system_kernel() {
  utsname names{};
  if (::uname(&names) != 0) return "unknown (uname failed)";
  return fmt::format("{} {} {}", names.sysname, names.release, names.machine);
}

// The instruction sets in /proc/cpuinfo that kernels or BLAS libraries depend on.
std::string instruction_sets() {
  constexpr std::string_view kSets[] = {"avx2",        "fma",      "avx512f",  "avx512_bf16", "avx512_fp16",
                                        "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8",    "amx_fp16",
                                        "asimd",       "bf16",     "i8mm",     "sve",         "sve2"};
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; flags.empty() && std::getline(file, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(line.substr(std::min(line.find(':') + 1, line.size())));
    for (std::string word; words >> word;) flags.insert(word);
  }
  if (flags.empty()) return "unknown (/proc/cpuinfo has no flags)";
  std::string text;
  for (const std::string_view set : kSets) {
    if (flags.contains(std::string(set))) text += fmt::format("{}{}", text.empty() ? "" : " ", set);
  }
  return text.empty() ? "none of those that kernels use" : text;
}

// The SIMD target that CPU kernels use.
std::string simd_target() {
  for (const OpKernel& kernel : all_kernels()) {
    if (kernel.row->backend == "cpu" && kernel.row->unavailable().empty()) {
      return kernel.row->make_backend({.threads = 1})->identity();
    }
  }
  return "none (no CPU kernel runs here)";
}

std::string network_state(const std::string& name) {
  const fs::path folder = fs::path("/sys/class/net") / name;
  const std::string state = first_line(folder / "operstate");
  const std::string speed = first_line(folder / "speed");  // Mbit/s; -1 or unreadable: the driver doesn't say
  return fmt::format("{}{}", state.empty() ? "state unknown" : state,
                     speed.empty() || speed.starts_with('-') ? "" : fmt::format(", {} Mbit/s", speed));
}

std::string infiniband_state(const std::string& name) {
  const fs::path ports = fs::path("/sys/class/infiniband") / name / "ports";
  std::string text;
  for (const std::string& port : names_in(ports)) {
    text += fmt::format("{}port {}: {}, {}, {}", text.empty() ? "" : "; ", port, first_line(ports / port / "state"),
                        first_line(ports / port / "rate"), first_line(ports / port / "link_layer"));
  }
  return text.empty() ? "no ports" : text;
}

std::string build_facts() {
  FactSection section("ringattn");
  section.add("version",
              [] { return fmt::format("{} (git {}{})", version(), git_revision(), git_dirty() ? "-dirty" : ""); });
  section.add("build id", [] { return build_id().empty() ? "none" : build_id(); });
  section.add("compiler",
              [] { return fmt::format("{}, {}", compiler(), build_type().empty() ? "custom build" : build_type()); });
  section.add("options", [] { return RINGATTN_BUILD_OPTIONS; });
  section.add("CUDA", cuda_versions);
  section.add("NCCL", nccl_version);
  section.add("MPI", mpi_library_version);
  section.add("kernels here", [] {
    std::string names;
    std::set<std::string_view> listed;
    for (const OpKernel& kernel : all_kernels()) {
      if (!kernel.row->unavailable().empty() || !listed.insert(kernel.row->name).second) continue;
      names += fmt::format("{}{}", names.empty() ? "" : " ", kernel.row->name);
    }
    return names.empty() ? "none" : names;
  });
  for (const TransportRow& row : transport_table()) {
    section.add(fmt::format("transport {}", row.name), [&] {
      const std::string why = row.unavailable();
      return why.empty() ? "yes" : fmt::format("no ({})", why);
    });
  }
  return section.text();
}

std::string machine_facts() {
  FactSection section("machine");
  section.add("system", system_name);
  section.add("kernel", system_kernel);
  section.add("glibc", [] {
#if __has_include(<gnu/libc-version.h>)
    return gnu_get_libc_version();
#else
    return "none (another C library)";
#endif
  });
  section.add("CPU", cpu_model);
  section.add("processors", [] {
    const auto is_node = [](const std::string& name) { return name.starts_with("node"); };
    return fmt::format("{} for this process, {} in the machine; NUMA nodes: {}", usable_processors().count,
                       ::sysconf(_SC_NPROCESSORS_CONF),
                       std::ranges::count_if(names_in("/sys/devices/system/node"), is_node));
  });
  section.add("instructions", instruction_sets);
  section.add("SIMD target", simd_target);
  section.add("memory", [] { return format_bytes(static_cast<double>(usable_bytes())); });
  return section.text();
}

std::string link_facts() {
  FactSection section("GPUs and links");
  if (visible_gpus().empty()) section.add("GPU", [] { return fmt::format("none ({})", gpus_unavailable()); });
  for (const Gpu& gpu : visible_gpus()) {
    section.add(fmt::format("GPU {}", gpu.device), [&] {
      return fmt::format("{}, compute capability {}.{}, {} SMs, {}; {}", gpu.name, gpu.compute_major, gpu.compute_minor,
                         gpu.multiprocessors, format_bytes(static_cast<double>(gpu.memory)), gpu_details(gpu.device));
    });
  }
  for (const Gpu& gpu : visible_gpus()) {
    for (const Gpu& other : visible_gpus()) {
      if (gpu.device >= other.device) continue;
      section.add(fmt::format("link {}-{}", gpu.device, other.device),
                  [&] { return peer_access_text(gpu.device, other.device); });
    }
  }
  for (const std::string& name : names_in("/sys/class/net")) {
    if (name != "lo") section.add(fmt::format("network {}", name), [&] { return network_state(name); });
  }
  const std::vector<std::string> adapters = names_in("/sys/class/infiniband");
  if (adapters.empty()) section.add("InfiniBand", [] { return "none (/sys/class/infiniband has no adapter)"; });
  for (const std::string& name : adapters) section.add(name, [&] { return infiniband_state(name); });
  return section.text();
}

std::string variable_facts() {
  constexpr std::string_view kPrefixes[] = {
      "RINGATTN_", "NCCL_", "CUDA_",    "NVIDIA_VISIBLE_DEVICES", "OMP_",       "GOMP_",     "KMP_", "MKL_NUM_THREADS",
      "OMPI_MCA_", "UCX_",  "PYTORCH_", "TORCH_CUDA_ARCH_LIST",   "LOCAL_RANK", "WORLD_SIZE"};
  FactSection section("environment");
  const std::vector<EnvironmentEntry> entries = environment_entries(kPrefixes);
  if (entries.empty()) section.add("variables", [] { return "none of RINGATTN_, NCCL_, CUDA_, OMP_ and the like"; });
  for (const EnvironmentEntry& entry : entries) section.add(entry.name, [&] { return entry.value; });
  return section.text();
}

}  // namespace

std::string printable_utf8(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t size = printable_bytes(text);
    if (size == 0) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned>(static_cast<unsigned char>(text[0])));
      text.remove_prefix(1);
    } else {
      result += text.substr(0, size);
      text.remove_prefix(size);
    }
  }
  return result;
}

FactSection::FactSection(std::string_view title) : text_(fmt::format("{}\n", title)) {}

void FactSection::add(std::string_view name, const std::function<std::string()>& value) {
  std::string text;
  try {
    text = value();
  } catch (const std::exception& error) {
    text = fmt::format("unknown ({})", error.what());
  }
  text_ += fmt::format("  {:<17} {}\n", printable_utf8(name), printable_utf8(text));
}

std::string environment_facts() {
  std::string text;
  for (std::string (*const section)() : {build_facts, machine_facts, link_facts, variable_facts}) {
    try {
      text += section();
    } catch (const std::exception& error) {
      text += printable_utf8(fmt::format("unknown ({})", error.what())) + "\n";
    }
  }
  return text;
}

}  // namespace ringattn
