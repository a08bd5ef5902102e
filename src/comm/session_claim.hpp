// SPDX-License-Identifier: Apache-2.0
// Decides which of a host's ranks prints a failure while ranks connect to a store. Before they are connected they can't
// ask each other once rank 0 is gone.
#pragma once

#include <mutex>
#include <string>

#include "base/file_descriptor.hpp"

namespace ringattn {

class SessionClaim {
 public:
  // Called once the ranks know their session (comm/tcp/store.hpp). Until then every rank may print.
  void begin(std::string session);

  // Returns true for the first process of the session on this host that calls it. It binds a socket with an abstract
  // name, which the system frees when the process ends. Thread-safe.
  bool try_claim() noexcept;

 private:
  std::mutex mutex_;
  std::string session_;
  FileDescriptor socket_;
};

}  // namespace ringattn
