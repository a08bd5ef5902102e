// SPDX-License-Identifier: Apache-2.0
// Any bytes from a rank that is connected, while an exchange with it is on its way: they end in its spans, or the rank
// is named. Nothing but an Error with one of the program's codes comes out.
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <memory>

#include "base/error.hpp"
#include "comm/tcp/flight.hpp"
#include "comm/tcp/transport_context.hpp"
#include "comm/tcp/wire.hpp"
#include "tests/fuzz/fuzz_target.hpp"

namespace ringattn::testing {

namespace {

constexpr std::size_t kMessage = 96;

std::string frame(FrameHead head, std::string_view body = {}) {
  head.bytes = static_cast<std::uint32_t>(body.size());
  return std::string(bytes_of(head)) + std::string(body);
}

FrameHead head_of(FrameKind kind, std::int64_t number = 0) {
  FrameHead head;
  head.kind = kind;
  head.number = number;
  return head;
}

// Until the other side has closed the connection.
bool is_closed(const FileDescriptor& socket) {
  for (int tries = 0; tries < 500; ++tries) {
    pollfd ready{socket.get(), POLLIN, 0};
    ::poll(&ready, 1, 20);
    std::array<char, 4096> bytes;
    const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> seeds;
  const std::string data = frame(head_of(FrameKind::kData), std::string(kMessage, 'd'));
  FrameHead ready = head_of(FrameKind::kReady);
  ready.total = kMessage;
  FrameHead sign = head_of(FrameKind::kHeartbeat);
  sign.shape = 'w';
  FrameHead notice = head_of(FrameKind::kNotice);
  notice.round = 1;
  seeds.push_back(data);
  seeds.push_back(frame(head_of(FrameKind::kData), std::string(40, 'd')) + frame(head_of(FrameKind::kData), "rest"));
  seeds.push_back(frame(head_of(FrameKind::kGather), "part") + data);
  seeds.push_back(frame(ready) + frame(sign) + data);
  seeds.push_back(frame(notice, pack_error(Error(ErrorCode::kFile, "x", "y", "z."))));
  seeds.push_back(frame(sign) + frame(head_of(FrameKind::kLeave)));
  seeds.push_back(frame(head_of(FrameKind::kReady, 1)) + frame(head_of(FrameKind::kReady, 2)));
  return seeds;
}

std::vector<std::string> fuzz_words() {
  std::vector<std::string> words{std::string(40, '\0'), std::string(8, '\xff')};
  for (const std::uint32_t number : {0U, 1U, 2U, 3U, 4U, 5U, 6U, 96U, 0x80000000U}) {
    words.emplace_back(bytes_of(number));
    words.emplace_back(bytes_of(std::uint64_t{number}));
  }
  return words;
}

}  // namespace ringattn::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ringattn;
  using namespace ringattn::testing;
  int ends[2] = {-1, -1};
  fuzz_check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "there are sockets");
  const FileDescriptor peer(ends[1]);
  Connections connections;
  connections.links.emplace_back();
  connections.links.emplace_back(ends[0]);
  connections.hosts = {"here", "there"};
  std::array<std::byte, kMessage> sent{}, received{};
  TcpTransportContext context(0, std::move(connections));
  {
    const std::lock_guard lock(context.mutex);
    Exchange exchange;
    exchange.sends.push_back({1, 0, {{sent.data(), kMessage}}});
    exchange.receives.push_back({1, 0, {{received.data(), 32}, {received.data() + 32, kMessage - 32}}});
    context.open_world(0)->flights.push_back(std::make_shared<TcpFlight>(std::move(exchange), 0, 0));
  }
  static_cast<void>(::send(peer.get(), data, size, MSG_NOSIGNAL));
  static_cast<void>(::shutdown(peer.get(), SHUT_WR));
  fuzz_check(is_closed(peer), "a connection that has ended is closed");
  try {
    context.check_alive();
  } catch (const Error& error) {
    const int code = static_cast<int>(error.code());
    fuzz_check(code >= 1 && code <= 7, "codes are the program's", error.what());
  }
  return 0;
}
