// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: non-blocking sockets and their addresses.
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

  std::string host() const;  // numeric, e.g. "10.0.0.7"
  int port() const;
  void set_port(int port);
  bool is_loopback() const;
  std::string text() const;  // "10.0.0.7:4000", "[fe80::1]:4000"
};

// "host:port", or "[host]:port" for an IPv6 address.
std::string endpoint_text(const std::string& host, int port);

// The addresses of a name or numeric address. If there are none, why_none has the reason. May query a name server.
struct Resolved {
  std::vector<SocketAddress> addresses;
  std::string why_none;
};
Resolved resolve_host(const std::string& host, int port);
// Accepts only numeric addresses and queries no name server.
std::vector<SocketAddress> numeric_address(const std::string& host, int port);

// The numeric addresses of this host's interfaces, without loopback.
std::vector<std::string> interface_addresses();

// A socket, or the errno of the failure.
struct Opened {
  FileDescriptor socket;
  int error = 0;
};
Opened open_listener(const SocketAddress& address);
// Listens on all interfaces of this host. Port 0: the system chooses one.
Opened open_listener_anywhere(int port);
// The connection may still be in progress. It has succeeded or failed once the socket is writable.
Opened begin_connection(const SocketAddress& address);
// The errno of a connection attempt; 0 if it has succeeded.
int connection_error(const FileDescriptor& socket);
// Accepts a pending connection of `listener`. Without one the error is EAGAIN.
Opened accept_connection(const FileDescriptor& listener);

SocketAddress local_address(const FileDescriptor& socket);

// Sets TCP_NODELAY, so that small messages are sent at once.
void set_no_delay(const FileDescriptor& socket);

// Waits until one of the sockets is ready, at most 20 ms, and sends a waiting heartbeat.
void poll_briefly(std::span<pollfd> sockets);

}  // namespace ringattn
