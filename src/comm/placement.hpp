// SPDX-License-Identifier: Apache-2.0
// Assigns GPUs to ranks: the GPU with the rank's index on its host, or the rank's only GPU if a launcher shows each
// process its own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn {

// The GPUs that a rank sees.
struct RankGpus {
  std::string host;
  std::string process;             // equal for ranks that are threads of one process
  std::vector<std::string> uuids;  // [visible GPUs], in the order of their indices
  std::string why_none;            // why there are none
};

struct Placement {
  std::vector<int> devices;  // [ranks] CUDA index of each rank's GPU in its process
  bool one_host = true;
  bool shared = false;   // ranks of one process share a GPU
  std::string obstacle;  // why the ranks can't be placed; empty if they can
};

// A pure function. Ranks of one process may share GPUs, processes may not.
Placement place_ranks(std::span<const RankGpus> ranks);

// The GPUs that this rank sees.
RankGpus my_gpus();

// place_ranks() for the GPUs that all ranks see. Collective.
Placement place_world(Bootstrap& world, const Deadline& deadline);

}  // namespace ringattn
