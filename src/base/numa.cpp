// SPDX-License-Identifier: Apache-2.0
#include "base/numa.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <strings.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

namespace ringattn {

namespace {

// Removes a number from the beginning of `text` and returns it.
std::optional<int> take_cpu(std::string_view& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || value < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

// Puts each rank on the node that has the middle processor of the rank's equal share.
std::vector<std::size_t> nodes_of_ranks(const NumaTopology& nodes, std::size_t total, std::size_t ranks) {
  std::vector<std::size_t> chosen;
  std::size_t node = 0;
  std::size_t end = nodes.front().size();  // one past the node's last processor
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::size_t middle = (2 * rank + 1) * total / (2 * ranks);
    while (middle >= end) end += nodes[++node].size();
    chosen.push_back(node);
  }
  return chosen;
}

// Gives each node to the rank whose equal share has the node's middle processor.
std::vector<CpuList> nodes_shared_out(const NumaTopology& nodes, std::size_t total, std::size_t ranks) {
  std::vector<CpuList> cpus(ranks);
  std::size_t begin = 0;
  for (const CpuList& node : nodes) {
    CpuList& rank = cpus[(2 * begin + node.size()) * ranks / (2 * total)];
    rank.insert(rank.end(), node.begin(), node.end());
    begin += node.size();
  }
  for (CpuList& rank : cpus) std::ranges::sort(rank);
  return cpus;
}

}  // namespace

std::optional<CpuList> parse_cpu_list(std::string_view text) {
  constexpr int kMaxCpus = 1 << 16;
  CpuList cpus;
  while (!text.empty()) {
    const std::optional<int> first = take_cpu(text);
    std::optional<int> last = first;
    if (first && text.starts_with('-')) {
      text.remove_prefix(1);
      last = take_cpu(text);
    }
    if (!first || !last || *last < *first || *last >= kMaxCpus) return std::nullopt;
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.push_back(cpu);
    if (text.empty()) break;
    if (!text.starts_with(',') || text.size() == 1) return std::nullopt;
    text.remove_prefix(1);
  }
  std::ranges::sort(cpus);
  cpus.erase(std::ranges::unique(cpus).begin(), cpus.end());
  return cpus;
}

std::string cpu_list_text(const CpuList& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", cpus[i]);
    if (last > i) text += fmt::format("-{}", cpus[last]);
    i = last + 1;
  }
  return text;
}

NumaTopology read_numa_topology(const std::string& folder) {
  std::vector<std::pair<int, CpuList>> nodes;  // by number
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    std::string_view digits = name;
    if (!digits.starts_with("node")) continue;
    digits.remove_prefix(4);
    const std::optional<int> number = take_cpu(digits);
    if (!number || !digits.empty()) continue;
    std::ifstream file(entry.path() / "cpulist");
    std::string line;
    std::getline(file, line);
    std::optional<CpuList> cpus = parse_cpu_list(line);
    if (cpus && !cpus->empty()) nodes.emplace_back(*number, std::move(*cpus));
  }
  std::ranges::sort(nodes);
  NumaTopology topology;
  for (auto& node : nodes) topology.push_back(std::move(node.second));
  return topology;
}

NumaPlacement place_on_numa_nodes(const NumaTopology& topology, const CpuList& allowed, int ranks) {
  NumaTopology nodes;
  std::size_t total = 0;
  for (const CpuList& node : topology) {
    CpuList usable;
    std::ranges::set_intersection(node, allowed, std::back_inserter(usable));
    total += usable.size();
    if (!usable.empty()) nodes.push_back(std::move(usable));
  }
  if (total != allowed.size() || nodes.empty())
    return {{}, "the system does not list the NUMA nodes of their processors"};
  if (nodes.size() == 1) return {{}, "their processors are on one NUMA node"};
  if (ranks <= 1) return {{}, fmt::format("one rank uses {} NUMA nodes", nodes.size())};
  const auto count = static_cast<std::size_t>(ranks);
  const std::size_t fair = total / count;
  bool even = true;
  NumaPlacement placement;
  if (count < nodes.size()) {
    placement.cpus = nodes_shared_out(nodes, total, count);
    for (const CpuList& rank : placement.cpus) even = even && !rank.empty() && rank.size() >= fair;
  } else {
    std::vector<std::size_t> sharing(nodes.size());
    for (const std::size_t node : nodes_of_ranks(nodes, total, count)) {
      ++sharing[node];
      placement.cpus.push_back(nodes[node]);
    }
    for (std::size_t node = 0; node < nodes.size(); ++node) {
      even = even && sharing[node] > 0 && nodes[node].size() / sharing[node] >= fair;
    }
  }
  if (!even) return {{}, fmt::format("{} ranks do not divide evenly over {} NUMA nodes", ranks, nodes.size())};
  return placement;
}

CpuList usable_cpus() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CpuList cpus;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &mask)) cpus.push_back(cpu);
  }
  return cpus;
}

std::string bind_thread(const CpuList& cpus) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &mask);
  return sched_setaffinity(0, sizeof mask, &mask) == 0 ? std::string() : std::strerror(errno);
}

std::string_view openmp_binding() {
  for (const char* name : {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr) continue;
    return ::strcasecmp(value, "false") == 0 ? std::string_view() : name;  // OMP_PROC_BIND=false turns all off
  }
  return {};
}

}  // namespace ringattn
