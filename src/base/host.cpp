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

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/status");
  std::size_t kilobytes = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("RssAnon:", 0) != 0 && line.rfind("RssShmem:", 0) != 0) continue;
    std::istringstream fields(line.substr(line.find(':') + 1));
    std::size_t value = 0;
    if (fields >> value) kilobytes += value;
  }
  return kilobytes * 1024;
}

}  // namespace ringattn
