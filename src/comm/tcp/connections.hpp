// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: connects every pair of ranks, given a Bootstrap.
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
  std::vector<FileDescriptor> links;  // [ranks] sockets; invalid for this rank itself
  std::vector<std::string> hosts;     // [ranks]
};

// Connects all ranks with each other. Collective. If all ranks are on one host, they listen only on its loopback
// interface. A connection is accepted once both sides have shown a number that only the ranks of this world know and,
// with a secret, have proved that they know it. `address` is a numeric address at which this rank can be reached, tried
// before those of its interfaces. It may be empty. If `secret` is not set, the environment's secret is used. Throws an
// AgreedError (kPeer) that names two ranks that can't reach each other, or the ranks without a secret if others have
// one.
Connections make_connections(Bootstrap& world, const std::string& address, const Timeouts& timeouts,
                             const std::optional<Secret>& secret = {});

}  // namespace ringattn
