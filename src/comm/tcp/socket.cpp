// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/socket.hpp"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <cstring>

#include "base/rank_liveness.hpp"

namespace ringattn {

namespace {

constexpr int kPollMilliseconds = 20;
constexpr int kBacklog = 512;  // ranks may connect all at once

sockaddr* raw(SocketAddress& address) { return reinterpret_cast<sockaddr*>(&address.storage); }
const sockaddr* raw(const SocketAddress& address) { return reinterpret_cast<const sockaddr*>(&address.storage); }

FileDescriptor new_socket(int family) {
  return FileDescriptor(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

void set_flag(const FileDescriptor& socket, int level, int name, int value) {
  static_cast<void>(::setsockopt(socket.get(), level, name, &value, sizeof value));
}

Opened listen_on(const SocketAddress& address, bool both_families) {
  Opened opened{new_socket(address.storage.ss_family), 0};
  if (!opened.socket.valid()) return {{}, errno};
  // A port that an earlier job has used can be bound again at once.
  set_flag(opened.socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.storage.ss_family == AF_INET6) set_flag(opened.socket, IPPROTO_IPV6, IPV6_V6ONLY, both_families ? 0 : 1);
  if (::bind(opened.socket.get(), raw(address), address.length) != 0) return {{}, errno};
  if (::listen(opened.socket.get(), kBacklog) != 0) return {{}, errno};
  return opened;
}

Resolved look_up(const std::string& host, int port, int flags) {
  Resolved resolved;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int result = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (result != 0) {
    resolved.why_none = ::gai_strerror(result);
    return resolved;
  }
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    SocketAddress& address = resolved.addresses.emplace_back();
    address.length = at->ai_addrlen;
    std::memcpy(&address.storage, at->ai_addr, at->ai_addrlen);
  }
  ::freeaddrinfo(found);
  return resolved;
}

}  // namespace

std::string SocketAddress::host() const {
  char text[NI_MAXHOST] = "";
  ::getnameinfo(raw(*this), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  const std::string_view number = text;
  constexpr std::string_view kMapped = "::ffff:";  // an IPv4 address on a dual-stack socket
  return std::string(number.starts_with(kMapped) ? number.substr(kMapped.size()) : number);
}

int SocketAddress::port() const {
  if (storage.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

void SocketAddress::set_port(int port) {
  const auto number = htons(static_cast<std::uint16_t>(port));
  if (storage.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port = number;
  } else {
    reinterpret_cast<sockaddr_in*>(&storage)->sin_port = number;
  }
}

bool SocketAddress::is_loopback() const {
  const std::string number = host();
  return number.starts_with("127.") || number == "::1";
}

std::string SocketAddress::text() const { return endpoint_text(host(), port()); }

std::string endpoint_text(const std::string& host, int port) {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port);
}

Resolved resolve_host(const std::string& host, int port) { return look_up(host, port, 0); }

std::vector<SocketAddress> numeric_address(const std::string& host, int port) {
  return look_up(host, port, AI_NUMERICHOST).addresses;
}

std::vector<std::string> interface_addresses() {
  std::vector<std::string> numbers;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return numbers;
  for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
    const bool up = (at->ifa_flags & IFF_UP) != 0 && (at->ifa_flags & IFF_LOOPBACK) == 0;
    if (!up || at->ifa_addr == nullptr) continue;
    SocketAddress address;
    if (at->ifa_addr->sa_family == AF_INET) {
      address.length = sizeof(sockaddr_in);
    } else if (at->ifa_addr->sa_family == AF_INET6) {
      address.length = sizeof(sockaddr_in6);
    } else {
      continue;
    }
    std::memcpy(&address.storage, at->ifa_addr, address.length);
    const std::string number = address.host();
    // The scope of a link-local address is valid only on this host.
    if (number.find('%') == std::string::npos) numbers.push_back(number);
  }
  ::freeifaddrs(all);
  return numbers;
}

Opened open_listener(const SocketAddress& address) { return listen_on(address, false); }

Opened open_listener_anywhere(int port) {
  SocketAddress six;
  six.storage.ss_family = AF_INET6;  // the rest is zero: any interface
  six.length = sizeof(sockaddr_in6);
  six.set_port(port);
  Opened opened = listen_on(six, true);
  if (opened.socket.valid()) return opened;
  SocketAddress four;
  four.storage.ss_family = AF_INET;
  four.length = sizeof(sockaddr_in);
  four.set_port(port);
  return listen_on(four, false);
}

Opened begin_connection(const SocketAddress& address) {
  Opened opened{new_socket(address.storage.ss_family), 0};
  if (!opened.socket.valid()) return {{}, errno};
  if (::connect(opened.socket.get(), raw(address), address.length) != 0 && errno != EINPROGRESS && errno != EINTR) {
    return {{}, errno};
  }
  set_no_delay(opened.socket);
  return opened;
}

int connection_error(const FileDescriptor& socket) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

Opened accept_connection(const FileDescriptor& listener) {
  const int fd =
      uninterrupted([&] { return ::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
  if (fd < 0) return {{}, errno};
  Opened opened{FileDescriptor(fd), 0};
  set_no_delay(opened.socket);
  return opened;
}

SocketAddress local_address(const FileDescriptor& socket) {
  SocketAddress address;
  address.length = sizeof address.storage;
  if (::getsockname(socket.get(), raw(address), &address.length) != 0) address.length = 0;
  return address;
}

void set_no_delay(const FileDescriptor& socket) { set_flag(socket, IPPROTO_TCP, TCP_NODELAY, 1); }

void poll_briefly(std::span<pollfd> sockets) {
  static_cast<void>(::poll(sockets.data(), sockets.size(), kPollMilliseconds));
  waiting_heartbeat();
}

}  // namespace ringattn
