// SPDX-License-Identifier: Apache-2.0
#include "base/host.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <string_view>

namespace ringattn {

namespace {

// A line of /proc/self/status that counts kB, in bytes; 0 where there is no such line.
std::size_t status_bytes(std::string_view name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) != 0) continue;
    std::istringstream fields(line.substr(name.size()));
    std::size_t kilobytes = 0;
    fields >> kilobytes;
    return kilobytes * 1024;
  }
  return 0;
}

}  // namespace

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

Processors usable_processors() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return {1, "unknown"};
  Processors processors{std::max(1, CPU_COUNT(&mask)), {}};
  for (std::size_t first = 0; first < CPU_SETSIZE; first += 8) {
    unsigned bits = 0;
    for (std::size_t i = 0; i < 8; ++i) bits |= (CPU_ISSET(first + i, &mask) ? 1U : 0U) << i;
    processors.set += fmt::format("{:02x}", bits);
  }
  return processors;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon != std::string::npos && colon + 2 <= line.size()) return line.substr(colon + 2);
  }
  return "unknown";
}

std::size_t resident_bytes() { return status_bytes("RssAnon:") + status_bytes("RssShmem:"); }

std::size_t peak_resident_bytes() {
  const std::size_t peak = status_bytes("VmHWM:");
  const std::size_t files = status_bytes("RssFile:");
  return peak > files ? peak - files : 0;
}

}  // namespace ringattn
