// SPDX-License-Identifier: Apache-2.0
// Inside the store on rank 0: connections from their acceptance until they belong to a rank of the job or are closed.
// No connection can block another: each advances independently and has a time limit. If there are too many, the oldest
// one is closed.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/tcp/handshake.hpp"
#include "comm/tcp/store_internal.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

class StoreAcceptor {
 public:
  // Called with a rank that may join. `is_there` is false for it.
  using Join = std::function<void(const Hello& hello, Wire wire)>;
  using IsThere = std::function<bool(int rank)>;

  StoreAcceptor(const StoreOptions& options, const Secret& secret, IsThere is_there, Join join)
      : options_(options), secret_(secret), is_there_(std::move(is_there)), join_(std::move(join)) {}

  // Accepts the pending connections of a listener.
  void accept_from(const FileDescriptor& listener);
  void add(FileDescriptor connection);
  void add_interests(std::vector<pollfd>& sockets) const;
  // Advances all connections without blocking.
  void go_on();

  // Why ranks that have not joined since were refused; empty if none was.
  std::string refusals() const;

  std::size_t size() const { return pending_.size(); }

 private:
  struct PendingConnection {
    Wire wire;
    Deadline deadline;
    std::optional<Introduction> introduction{};  // it has been answered, and the wire is authenticated
  };
  // The reason for a refused rank that has proved nothing, and the reason for rank 0.
  struct Refusal {
    std::string for_stranger, for_rank_0;
  };

  bool handle(PendingConnection& pending);
  bool take_introduction(PendingConnection& pending, const WireFrame& frame);
  bool take_hello(PendingConnection& pending, const Hello& hello);
  bool refuse(PendingConnection& pending, const Error& error);
  void note(int rank, std::string why);
  std::optional<Refusal> why_not(const Hello& hello) const;

  const StoreOptions& options_;
  const Secret secret_;
  const IsThere is_there_;
  const Join join_;
  std::list<PendingConnection> pending_;
  std::map<int, std::string> refused_;  // by rank; -1: a rank that the world doesn't have
};

}  // namespace ringattn
