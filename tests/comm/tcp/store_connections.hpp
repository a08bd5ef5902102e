// SPDX-License-Identifier: Apache-2.0
// What tests of the store share: threads that are its ranks, raw frames, and connections to it.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/tcp/handshake.hpp"
#include "comm/tcp/store_internal.hpp"

namespace ringattn::testing {

// An upper bound that is never reached, and how late a call may end on a busy machine.
inline constexpr double kStoreTimeout = 20.0;
inline constexpr double kStoreSlack = 5.0;

inline bool has(const Error& error, std::string_view part) {
  return std::string_view(error.what()).find(part) != std::string_view::npos;
}

// Runs each on a thread of its own.
class Threads {
 public:
  ~Threads() { join(); }
  void run(std::function<void()> body) { threads_.emplace_back(std::move(body)); }
  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  std::vector<std::thread> threads_;
};

inline std::string plain_frame(WireKind kind, std::string_view body) {
  std::string text = "ringattn";
  text += bytes_of(std::uint32_t{1});
  text += bytes_of(static_cast<std::uint32_t>(kind));
  text += bytes_of(std::uint64_t{body.size()});
  return text + std::string(body);
}

inline void send_raw(const Wire& wire, std::string_view bytes) {
  EXPECT_EQ(::send(wire.socket().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

inline std::optional<WireFrame> next_frame(Wire& wire, double seconds = kStoreSlack) {
  std::optional<WireFrame> frame;
  for (const Deadline deadline = Deadline::after(seconds); !frame && !deadline.expired();) {
    pollfd socket = wire.interest();
    poll_briefly({&socket, 1});
    const bool open = wire.move();
    frame = wire.take();
    if (!open && !frame) break;
  }
  return frame;
}

// Connects once a server listens there.
inline Wire connect_to(int port) {
  for (const Deadline deadline = Deadline::after(kStoreTimeout); !deadline.expired();) {
    Opened opened = begin_connection(numeric_address("127.0.0.1", port).at(0));
    pollfd socket{opened.socket.get(), POLLOUT, 0};
    ::poll(&socket, 1, 1000);
    if (connection_error(opened.socket) == 0) return Wire(std::move(opened.socket));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ADD_FAILURE() << "nobody listens";
  return Wire(FileDescriptor());
}

struct WirePair {
  Wire a, b;
};

inline WirePair make_wires() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  return {Wire(FileDescriptor(ends[0])), Wire(FileDescriptor(ends[1]))};
}

// The bytes of a frame as the caller sends it first with those keys.
inline std::string bytes_with(const ConnectionKeys& keys, WireKind kind, std::string_view body) {
  WirePair wires = make_wires();
  wires.a.authenticate(keys.to_listener, keys.to_caller);
  wires.a.send(kind, body);
  wires.a.flush();
  std::string bytes(4096, '\0');
  const ssize_t count = ::recv(wires.b.socket().get(), bytes.data(), bytes.size(), 0);
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  return bytes;
}

}  // namespace ringattn::testing
