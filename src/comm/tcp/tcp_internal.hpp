// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: a world together with its context, for programs that monitor their ranks.
#pragma once

#include <memory>

#include "comm/tcp/tcp.hpp"
#include "comm/tcp/transport_context.hpp"

namespace ringattn {

struct TcpWorld {
  std::unique_ptr<Transport> transport;
  std::shared_ptr<TcpTransportContext> context;
};

// As make_tcp_transport().
TcpWorld make_tcp_world(Bootstrap& bootstrap, const TcpOptions& options);

}  // namespace ringattn
