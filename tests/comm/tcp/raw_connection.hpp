// SPDX-License-Identifier: Apache-2.0
// A connection of a client that doesn't speak ringattn's protocol, or misuses it.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <string>
#include <string_view>

#include "comm/tcp/socket.hpp"

namespace ringattn::testing {

class RawConnection {
 public:
  explicit RawConnection(int port) : RawConnection(begin_connection(numeric_address("127.0.0.1", port).at(0)).socket) {
    pollfd socket{socket_.get(), POLLOUT, 0};
    ::poll(&socket, 1, 5000);
  }
  explicit RawConnection(FileDescriptor socket) : socket_(std::move(socket)) {}

  bool is_there() const { return connection_error(socket_) == 0; }
  void send(std::string_view bytes) const {
    while (!bytes.empty()) {
      pollfd socket{socket_.get(), POLLOUT, 0};
      ::poll(&socket, 1, 5000);
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;  // the other side has closed it, as it may
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
  }
  // Whether the other side closes the connection in time; what it sends before is passed over.
  bool is_closed_within(double seconds) const {
    for (const Deadline deadline = Deadline::after(seconds); !deadline.expired();) {
      pollfd socket{socket_.get(), POLLIN, 0};
      ::poll(&socket, 1, 20);
      char bytes[4096];
      const ssize_t got = ::recv(socket_.get(), bytes, sizeof bytes, 0);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
    }
    return false;
  }

 private:
  FileDescriptor socket_;
};

}  // namespace ringattn::testing
