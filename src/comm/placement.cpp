// SPDX-License-Identifier: Apache-2.0
#include "comm/placement.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "base/gpu.hpp"
#include "base/host.hpp"
#include "comm/failure.hpp"

namespace ringattn {

namespace {

std::string name_of(std::span<const RankGpus> ranks, std::size_t rank) {
  return fmt::format("rank {} on {}", rank, ranks[rank].host);
}

// The first GPU that `rank` sees and that is not taken, preferably the one with its local index. −1 if there is none.
int free_gpu(const RankGpus& rank, std::size_t local, const std::map<std::string, std::size_t>& taken) {
  if (local < rank.uuids.size() && !taken.contains(rank.uuids[local])) return static_cast<int>(local);
  for (std::size_t i = 0; i < rank.uuids.size(); ++i) {
    if (!taken.contains(rank.uuids[i])) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

Placement place_ranks(std::span<const RankGpus> ranks) {
  Placement placement;
  std::map<std::string, std::size_t> ranks_on;  // host → ranks placed there so far
  std::map<std::string, std::size_t> taken;     // GPU → the first rank that has it
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const RankGpus& rank = ranks[i];
    placement.one_host = placement.one_host && rank.host == ranks[0].host;
    const std::size_t local = ranks_on[rank.host]++;
    if (rank.uuids.empty()) {
      placement.obstacle = fmt::format("{} has no GPU: {}", name_of(ranks, i), rank.why_none);
      return placement;
    }
    int device = free_gpu(rank, local, taken);
    if (device < 0) {
      device = static_cast<int>(local % rank.uuids.size());
      const std::size_t owner = taken.at(rank.uuids[static_cast<std::size_t>(device)]);
      if (ranks[owner].process != rank.process || ranks[owner].host != rank.host) {
        placement.obstacle =
            fmt::format("{} has no GPU of its own: it sees {}, and {} has {}", name_of(ranks, i), rank.uuids.size(),
                        name_of(ranks, owner), rank.uuids.size() == 1 ? "it" : "its");
        return placement;
      }
      placement.shared = true;
    }
    taken.emplace(rank.uuids[static_cast<std::size_t>(device)], i);
    placement.devices.push_back(device);
  }
  return placement;
}

RankGpus my_gpus() {
  RankGpus mine;
  mine.host = host_name();
  mine.process = std::to_string(getpid());
  for (const Gpu& gpu : visible_gpus()) mine.uuids.push_back(gpu.uuid);
  mine.why_none = gpus_unavailable();
  return mine;
}

Placement place_world(Bootstrap& world, const Deadline& deadline) {
  // One line each: host, process, reason, GPUs.
  const RankGpus mine = my_gpus();
  std::string text = mine.host + '\n' + mine.process + '\n' + mine.why_none + '\n';
  for (const std::string& uuid : mine.uuids) text += uuid + '\n';
  std::vector<RankGpus> all;
  for (const std::string& theirs : world.all_gather(text, deadline)) {
    std::istringstream lines(theirs);
    RankGpus& rank = all.emplace_back();
    std::getline(lines, rank.host);
    std::getline(lines, rank.process);
    std::getline(lines, rank.why_none);
    for (std::string uuid; std::getline(lines, uuid);) rank.uuids.push_back(uuid);
  }
  return place_ranks(all);
}

}  // namespace ringattn
