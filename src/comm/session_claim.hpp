// SPDX-License-Identifier: Apache-2.0
// Which of a host's ranks prints a failure while ranks come together at a store: before they are connected, they can't
// ask each other once rank 0 is gone.
#pragma once

#include <mutex>
#include <string>

#include "base/file_descriptor.hpp"

namespace ringattn {

class SessionClaim {
 public:
  // The ranks know each other's session (comm/tcp/store.hpp). Until then each speaks for itself.
  void begin(std::string session);

  // Whether the calling process is the first of its session's on this host to ask. A socket's abstract name tells,
  // which the system frees when the process ends. Thread-safe.
  bool try_claim() noexcept;

 private:
  std::mutex mutex_;
  std::string session_;
  FileDescriptor socket_;
};

}  // namespace ringattn
