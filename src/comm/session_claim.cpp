// SPDX-License-Identifier: Apache-2.0
#include "comm/session_claim.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <utility>

namespace ringattn {

void SessionClaim::begin(std::string session) {
  const std::lock_guard lock(mutex_);
  session_ = std::move(session);
}

bool SessionClaim::try_claim() noexcept {
  const std::lock_guard lock(mutex_);
  if (session_.empty()) return true;
  if (socket_.valid()) return false;
  constexpr std::string_view kPrefix = "ringattn-message-";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  char* const name = address.sun_path + 1;  // abstract name: starts with a NUL and creates no file
  const std::size_t max_length = sizeof address.sun_path - 1 - kPrefix.size();
  const std::size_t length = std::min(session_.size(), max_length);
  std::memcpy(name, kPrefix.data(), kPrefix.size());
  std::memcpy(name + kPrefix.size(), session_.data(), length);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + kPrefix.size() + length);
  FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return true;
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0) return errno != EADDRINUSE;
  socket_ = std::move(socket);
  return true;
}

}  // namespace ringattn
