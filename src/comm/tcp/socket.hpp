// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: sockets that never keep a thread waiting, and their addresses.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <span>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/file_descriptor.hpp"

namespace ringattn {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  std::string host() const;  // its number, e.g. "10.0.0.7"
  int port() const;
  void set_port(int port);
  bool is_loopback() const;
  std::string text() const;  // "10.0.0.7:4000", "[fe80::1]:4000"
};

// A host and a port as one text.
std::string endpoint_text(const std::string& host, int port);

// What a name or a number stands for; empty, with the reason, where the system knows none. May ask a name server.
struct Resolved {
  std::vector<SocketAddress> addresses;
  std::string why_none;
};
Resolved resolve_host(const std::string& host, int port);
// Of a number alone; nobody is asked.
std::vector<SocketAddress> numeric_address(const std::string& host, int port);

// This host's own interfaces, as numbers, loopback left out.
std::vector<std::string> interface_addresses();

// A socket, or the errno of why not.
struct Opened {
  FileDescriptor socket;
  int error = 0;
};
Opened open_listener(const SocketAddress& address);
// On all interfaces of this host. Port 0: one that the system chooses.
Opened open_listener_anywhere(int port);
// The connection may still be on its way: it is there, or has failed, once the socket can be written to.
Opened begin_connection(const SocketAddress& address);
// The errno of a connection that has been on its way; 0: it is there.
int connection_error(const FileDescriptor& socket);
// A connection that has come to `listener`; none, with EAGAIN, while there is none.
Opened accept_connection(const FileDescriptor& listener);

SocketAddress own_end(const FileDescriptor& socket);
SocketAddress far_end(const FileDescriptor& socket);

// Small messages are sent at once.
void send_at_once(const FileDescriptor& socket);

// Waits until one of the sockets is ready, a moment at most; the calling rank's liveness looks up.
void poll_briefly(std::span<pollfd> sockets);

}  // namespace ringattn
