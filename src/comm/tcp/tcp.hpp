// SPDX-License-Identifier: Apache-2.0
// Transport `tcp`: sends host memory between processes over sockets, on one or several hosts, without MPI. It also
// serves as the bootstrap and control channel of device transports.
//
// The ranks use a Bootstrap to connect each pair of ranks, and not afterwards. MPI-free launchers use the store
// (comm/tcp/store.hpp), and callers can provide their own functions (comm/callbacks.hpp).
//
// A receiver announces when a message has a destination. Its bytes then go directly from the sender's memory to the
// receiver's. A thread of each process moves them, so computing ranks need not call progress(). Each connection starts
// with a number that only ranks of the same world know and, if the job has a secret, with proofs by both sides that
// they know it. Afterwards connections are neither encrypted nor authenticated: docs/security.md.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "comm/tcp/secret.hpp"
#include "comm/transport.hpp"

namespace ringattn {

struct TcpOptions {
  Route route = Route::kChain;
  double setup_seconds = 60.0;     // time limit for every step of connecting
  std::string address;             // numeric address of this host for other ranks; empty: use its interfaces'
  std::optional<Secret> secret{};  // not set: the environment's secret
};

// Collective among the ranks of `bootstrap`. Throws an AgreedError (kPeer) if ranks can't reach each other or only some
// of them have a secret. All calls must come from one thread. abort() tells the other ranks but ends no process.
std::unique_ptr<Transport> make_tcp_transport(Bootstrap& bootstrap, const TcpOptions& options = {});

}  // namespace ringattn
