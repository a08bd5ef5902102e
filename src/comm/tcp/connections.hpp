// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: ranks that can meet somehow connect each to each.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.hpp"
#include "comm/tcp/secret.hpp"
#include "comm/timeouts.hpp"
#include "comm/transport.hpp"

namespace ringattn {

struct Connections {
  std::vector<FileDescriptor> links;  // [ranks]; none to this rank itself
  std::vector<std::string> hosts;     // [ranks]
};

// Collective. Where all ranks are on one host, nothing listens beyond its loopback interface. A connection counts once
// both sides have shown a number that only the ranks of this world were told and, with a secret, proved that they know
// it. `address`: a number that this rank can be reached at, tried before those of its interfaces; may be empty. Throws
// an AgreedError (kPeer) that names two ranks that can't reach each other, or those that have no secret where others
// do. `secret`: not set, that of the environment.
Connections make_connections(Bootstrap& world, const std::string& address, const Timeouts& timeouts,
                             const std::optional<Secret>& secret = {});

}  // namespace ringattn
