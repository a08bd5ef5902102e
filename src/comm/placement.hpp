// SPDX-License-Identifier: Apache-2.0
// Which GPU serves which rank: the one of its number on its host, or its only one where a launcher shows each process
// its own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn {

// What a rank sees.
struct RankGpus {
  std::string host;
  std::string process;             // equal for ranks that are threads of one process
  std::vector<std::string> uuids;  // of its visible GPUs, in the order of their indices
  std::string why_none;            // why there are none
};

struct Placement {
  std::vector<int> devices;  // [ranks] index of each rank's GPU in its process
  bool one_host = true;
  bool shared = false;   // a GPU serves several ranks, all of one process
  std::string obstacle;  // why the ranks can't be placed; empty: they are
};

// Pure. Ranks of one process may share GPUs, processes may not.
Placement place_ranks(std::span<const RankGpus> ranks);

// What this rank sees.
RankGpus my_gpus();

// place_ranks() of what every rank sees. Collective.
Placement place_world(Bootstrap& world, const Deadline& deadline);

}  // namespace ringattn
