// SPDX-License-Identifier: Apache-2.0
// Transport `tcp`: host memory between processes over sockets, on one host or several, without MPI. Also the bootstrap
// and control channel of device transports.
//
// Ranks that can meet somehow, by a Bootstrap, connect each to each; it is not used afterwards. One comes from MPI-free
// launchers (comm/tcp/store.hpp), another is made of the caller's own functions (comm/callbacks.hpp).
//
// A receiver says when a message has a place; then its bytes go from the sender's memory to the receiver's without a
// stop. A thread of each process moves them, so ranks that compute need not call progress(). Each connection begins
// with a number that only ranks of the same world were told and, where the job has a secret, with proofs of both sides
// that they know it. Afterwards connections are neither encrypted nor authenticated: docs/security.md.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "comm/tcp/secret.hpp"
#include "comm/transport.hpp"

namespace ringattn {

struct TcpOptions {
  Route route = Route::kChain;
  double setup_seconds = 60.0;     // for every step of connecting
  std::string address;             // a number that others can reach this host at; empty: its interfaces' are tried
  std::optional<Secret> secret{};  // not set: that of the environment
};

// Collective among the ranks of `bootstrap`. Throws an AgreedError (kPeer) where ranks can't reach each other or only
// some of them have a secret. All calls come from one thread. abort() tells the other ranks but ends no process.
std::unique_ptr<Transport> make_tcp_transport(Bootstrap& bootstrap, const TcpOptions& options = {});

}  // namespace ringattn
