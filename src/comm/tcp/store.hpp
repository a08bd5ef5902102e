// SPDX-License-Identifier: Apache-2.0
// The store: the rendezvous of a job's ranks without MPI, at an address that rank 0 serves until they are connected.
//
// With a secret, a rank and the store prove to each other that they know it (comm/tcp/handshake.hpp) before either
// reveals anything about the job, and every frame has a MAC. Without one, the store recognizes ranks by the first bytes
// that they send, and separates jobs on one port by name, so any process that connects may take a rank's place. In both
// cases the store accepts only fixed-size heads and bounded bodies, and executes nothing that it receives.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/message_template.hpp"
#include "comm/tcp/secret.hpp"
#include "comm/transport.hpp"

namespace ringattn {

struct StoreAddress {
  std::string host;
  int port = 0;

  std::string text() const;
};

// Accepts "host:port", "10.0.0.7:29555", "[::1]:29555". Returns nothing for other text.
std::optional<StoreAddress> parse_store_address(std::string_view text);

struct StoreOptions {
  StoreAddress address;
  int rank = 0;
  int size = 1;
  std::string job;                 // equal on the ranks of one job; at most kMaxJobName bytes
  double seconds = 60.0;           // time limit for the ranks to connect
  std::optional<Secret> secret{};  // not set: the environment's secret
  // Called on rank 0 if the store has no secret and listens to other hosts.
  std::function<void(const MessageTemplate&)> warn{};
};

inline constexpr std::size_t kMaxJobName = 127;
inline constexpr int kMaxStoreRanks = 4096;

// A Bootstrap and nothing more: make_tcp_transport() starts from it. All connections go to rank 0.
class Store : public Bootstrap {
 public:
  // The host name of each rank.
  virtual const std::vector<std::string>& hosts() const = 0;
  // The numeric address of this rank's end of its connection, at which others may reach it. Empty if unknown.
  virtual std::string own_address() const = 0;
  // A random text that only the ranks of this world know.
  virtual const std::string& session() const = 0;
};

// Serves the address on rank 0, and connects to it on the other ranks. Collective. Returns when all `size` ranks are
// connected.
//
// Throws kUsage if rank 0 can't serve the address, and on a rank that the store refuses: one of another job, with
// another number of ranks, or with a rank number that is connected already. Throws kPeer on a rank whose secret differs
// from the store's, or if only one of the two has one. The other ranks then keep waiting for the right one. Throws
// kPeer, naming the missing ranks, when the time limit expires. If rank 0 throws, the others throw its error, whose
// location says so. Throws the errors of secret_of_environment().
std::unique_ptr<Store> make_store(const StoreOptions& options);

}  // namespace ringattn
