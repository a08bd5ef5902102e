// SPDX-License-Identifier: Apache-2.0
#include "base/host.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>

namespace ringattn {

namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

// The value in bytes of a /proc file's line that counts kB; 0 if there is no such line.
std::size_t bytes_in(const char* path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) != 0) continue;
    std::istringstream fields(line.substr(name.size()));
    std::size_t kilobytes = 0;
    fields >> kilobytes;
    return kilobytes * 1024;
  }
  return 0;
}

std::size_t status_bytes(std::string_view name) { return bytes_in("/proc/self/status", name); }

// The byte limit that a cgroup file holds. "max" or a missing file means no limit.
std::size_t limit_in(const std::string& path) {
  std::ifstream file(path);
  std::size_t bytes = 0;
  return file >> bytes ? bytes : kNoLimit;
}

// The smallest limit of a cgroup and its ancestors: for "/a/b", those of <root>/a/b, <root>/a and <root>.
std::size_t group_limit(const std::string& root, std::string group, const std::string& file) {
  std::size_t limit = limit_in(root + "/" + file);
  while (group.size() > 1 && group.front() == '/') {
    limit = std::min(limit, limit_in(root + group + "/" + file));
    group.resize(group.rfind('/'));
  }
  return limit;
}

std::size_t group_limit() {
  std::size_t limit = kNoLimit;
  std::ifstream file("/proc/self/cgroup");  // hierarchy:controllers:group
  for (std::string line; std::getline(file, line);) {
    const std::size_t controllers = line.find(':') + 1;
    const std::size_t group = line.find(':', controllers) + 1;
    if (controllers == 0 || group == 0) continue;
    const std::string names = line.substr(controllers, group - 1 - controllers);
    if (names.empty()) limit = std::min(limit, group_limit("/sys/fs/cgroup", line.substr(group), "memory.max"));
    if (names == "memory") {
      limit = std::min(limit, group_limit("/sys/fs/cgroup/memory", line.substr(group), "memory.limit_in_bytes"));
    }
  }
  return limit;
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

std::size_t usable_bytes() {
  constexpr const char* kMemory = "/proc/meminfo";
  const std::size_t host = bytes_in(kMemory, "MemTotal:") + bytes_in(kMemory, "SwapTotal:");
  return std::min(host == 0 ? kNoLimit : host, group_limit());
}

std::size_t peak_resident_bytes() {
  const std::size_t peak = status_bytes("VmHWM:");
  const std::size_t files = status_bytes("RssFile:");
  return peak > files ? peak - files : 0;
}

}  // namespace ringattn
