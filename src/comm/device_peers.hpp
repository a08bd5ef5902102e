// SPDX-License-Identifier: Apache-2.0
// Identifies the ranks of a device transport: the host and the GPU of each.
#pragma once

#include <string>
#include <vector>

#include "comm/failure.hpp"
#include "comm/transport.hpp"

namespace ringattn {

struct DevicePeer {
  std::string host;     // host name
  std::string boot;     // kernel boot ID, because hosts may share a name
  std::string process;  // equal for ranks that are threads of one process
  std::string gpu;      // UUID; empty if the rank has no such GPU
};

// Every rank's DevicePeer, in rank order. Collective.
std::vector<DevicePeer> gather_device_peers(Bootstrap& control, int device, const Deadline& deadline);

// "rank 3 on node7 (GPU-1a2b3c4d)".
RankNames name_device_peers(const std::vector<DevicePeer>& peers);

}  // namespace ringattn
