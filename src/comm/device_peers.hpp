// SPDX-License-Identifier: Apache-2.0
// Who the ranks of a device transport are: where each runs, and on which GPU.
#pragma once

#include <string>
#include <vector>

#include "comm/failure.hpp"
#include "comm/transport.hpp"

namespace ringattn {

struct DevicePeer {
  std::string host;     // its name
  std::string boot;     // which start of which kernel: hosts may have the same name
  std::string process;  // equal for ranks that are threads of one process
  std::string gpu;      // UUID; empty where the rank has no such GPU
};

// Collective.
std::vector<DevicePeer> gather_device_peers(Bootstrap& control, int device, const Deadline& deadline);

// "rank 3 on node7 (GPU-1a2b3c4d)".
RankNames name_device_peers(const std::vector<DevicePeer>& peers);

}  // namespace ringattn
