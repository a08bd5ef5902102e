// SPDX-License-Identifier: Apache-2.0
// Worlds of device transports whose ranks are processes, one a GPU of this host, for the conformance suite.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/transport.hpp"
#include "tests/comm/world_cases.hpp"

namespace ringattn::testing {

// Makes a rank's world from its control.
using MakeWorld = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport> control)>;
using RankMain = std::function<int(Transport&)>;
// How ranks come together: makes this rank's control and, of that, its world, plays its part in it, and returns the sum
// of what all ranks returned. The ranks meet before a world goes: a failed rank's messages may still be on their way.
using PlayRank = std::function<int(const MakeWorld& make, const RankMain& rank_main)>;

// The worlds of all device transports that this build has. Rank r of `ranks` has GPU r.
std::vector<WorldCase> device_world_cases(int rank, int ranks, const PlayRank& play);

}  // namespace ringattn::testing
