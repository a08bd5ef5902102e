// SPDX-License-Identifier: Apache-2.0
// A port of this host that nothing uses.
#pragma once

#include "comm/tcp/socket.hpp"

namespace ringattn::testing {

// A free port of the loopback interface. Other programs may still take it; the system gives out each number once in a
// while.
inline int free_port() {
  const Opened opened = open_listener(numeric_address("127.0.0.1", 0).at(0));
  return local_address(opened.socket).port();
}

}  // namespace ringattn::testing
