// SPDX-License-Identifier: Apache-2.0
// A port of this host that nothing uses.
#pragma once

#include "comm/tcp/socket.hpp"

namespace ringattn::testing {

// A free port of the loopback interface. Another program may still take it, but the system does not assign the same
// port again soon.
inline int free_port() {
  const Opened opened = open_listener(numeric_address("127.0.0.1", 0).at(0));
  return local_address(opened.socket).port();
}

}  // namespace ringattn::testing
