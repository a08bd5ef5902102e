// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a job come together without MPI: at an address that rank 0 serves while they do.
//
// With a secret, a rank and the store prove to each other that they know it (comm/tcp/handshake.hpp) before either
// tells anything of the job, and every frame has a MAC. Without one the store tells ranks from strangers by the first
// bytes that they send, and jobs on one port from each other by a name: whoever connects may take a rank's place. In
// both cases it takes fixed-size heads and bounded bodies only, and runs nothing that it is sent.
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

// "host:port", "10.0.0.7:29555", "[::1]:29555"; nothing for what is no such address.
std::optional<StoreAddress> parse_store_address(std::string_view text);

struct StoreOptions {
  StoreAddress address;
  int rank = 0;
  int size = 1;
  std::string job;                 // equal on the ranks of one job; at most kMaxJobName bytes
  double seconds = 60.0;           // for the ranks to come
  std::optional<Secret> secret{};  // not set: that of the environment
  // Told, on rank 0, that the store has no secret and listens to other hosts.
  std::function<void(const MessageTemplate&)> warn{};
};

inline constexpr std::size_t kMaxJobName = 127;
inline constexpr int kMaxStoreRanks = 4096;

// A world that can meet, and nothing else: what make_tcp_transport() starts from. The connections go through rank 0.
class Store : public Bootstrap {
 public:
  // "rank 3 on node7" for each rank.
  virtual const std::vector<std::string>& hosts() const = 0;
  // The number of this rank's own end of its connection: an address that others may reach it at. Empty: not known.
  virtual std::string own_address() const = 0;
  // A random text that the ranks of this world share, and nobody else was told.
  virtual const std::string& session() const = 0;
};

// Serves the address on rank 0, and comes to it on the others. Collective; returns when all `size` ranks are there.
//
// Throws kUsage where rank 0 can't serve the address, and on a rank that the store refuses: of another job, with
// another number of ranks, or with a rank that is there already; kPeer on a rank whose secret is not the store's, or
// where only one of the two has one. The others then wait for the right one. Throws kPeer, naming who has not come,
// when the time is over; where rank 0 does, the others throw its error, whose place says so. Throws what
// secret_of_environment() does.
std::unique_ptr<Store> make_store(const StoreOptions& options);

}  // namespace ringattn
