// SPDX-License-Identifier: Apache-2.0
#include "base/process.hpp"

#include <sched.h>
#include <unistd.h>

#include <fstream>
#include <string_view>

namespace ringattn {

namespace {

// Value of the first line "name : value" or "name: value" of a file under /proc; empty if there is none.
std::string proc_value(const char* path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return {};
}

std::size_t status_bytes(std::string_view name) {
  const std::string value = proc_value("/proc/self/status", name);  // e.g. "1234 kB"
  return value.empty() ? 0 : std::size_t{1024} * std::stoull(value);
}

}  // namespace

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

std::string cpu_model() {
  const std::string model = proc_value("/proc/cpuinfo", "model name");
  return model.empty() ? "unknown" : model;
}

std::vector<int> allowed_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> processors;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return processors;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(static_cast<std::size_t>(i), &set)) processors.push_back(i);
  }
  return processors;
}

std::size_t physical_memory() {
  return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE));
}

std::size_t peak_memory() {
  const std::size_t peak = status_bytes("VmHWM");
  const std::size_t files = status_bytes("RssFile");
  return peak > files ? peak - files : 0;
}

}  // namespace ringattn
