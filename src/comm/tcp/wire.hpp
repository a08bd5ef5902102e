// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: the frames that ranks exchange while they connect. A frame has a head of fixed size and a
// body of bounded size. A connection that sends anything else is not a rank's, and is closed. If the job has a secret,
// each frame after the handshake (comm/tcp/handshake.hpp) ends with a MAC of its number, head and body.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "comm/tcp/mac.hpp"
#include "comm/tcp/socket.hpp"

namespace ringattn {

enum class WireKind : std::uint32_t {
  kHello = 1,     // to the store: the rank's Hello
  kComplete = 2,  // from the store: all ranks are connected
  kFailed = 3,    // from the store: an error, as pack_error() writes it
  kGather = 4,    // to the store: this rank's part of an all-gather
  kGathered = 5,  // from the store: all parts
  kPeer = 6,      // between two ranks: their numbers and the world's
  // The next three are used only with a secret (comm/tcp/handshake.hpp).
  kIntroduction = 7,
  kProof = 8,
  kMismatch = 9,  // to a listener: its proof is wrong
  kWait = 10,     // to the store: how long this rank waits for the next all-gather
};
inline constexpr std::uint32_t kLastWireKind = 10;

struct WireFrame {
  WireKind kind;
  std::string body;
};

class Wire {
 public:
  // The maximum size of a body, in bytes.
  static constexpr std::size_t kMaxBytes = std::size_t{16} << 20;

  explicit Wire(FileDescriptor socket) : socket_(std::move(socket)) {}

  const FileDescriptor& socket() const { return socket_; }
  FileDescriptor take_socket() { return std::move(socket_); }

  // Queues a frame. move() and flush() send it.
  void send(WireKind kind, std::string_view body);
  // Sends what can be sent without blocking, and receives nothing. A few bytes go at once.
  void flush() { send_some(); }
  // Sends and receives what it can without blocking. Returns false once the peer has closed the connection or has sent
  // an invalid frame, or one with a body of more than `max_bytes`.
  bool move(std::size_t max_bytes = kMaxBytes);
  // The next complete frame. Bytes after it stay in the socket, so nothing is lost when the socket is taken over.
  std::optional<WireFrame> take();

  // From the next frame on, frames in both directions have MACs. Bytes received already count as forged, because they
  // came before the peer could make a MAC.
  void authenticate(const Mac& sends, const Mac& receives);
  bool is_authenticated() const { return keys_.has_value(); }

  // Returns true if data arrived that is not a ringattn frame.
  bool is_foreign() const { return foreign_; }
  // Returns true if a frame with a wrong MAC arrived.
  bool is_forged() const { return forged_; }
  bool all_sent() const { return sent_ == outgoing_.size(); }
  // The events for poll().
  pollfd interest() const { return {socket_.get(), static_cast<short>(all_sent() ? POLLIN : POLLIN | POLLOUT), 0}; }

 private:
  struct Head {
    char magic[8];
    std::uint32_t version;  // also detects a different byte order
    std::uint32_t kind;
    std::uint64_t bytes;
  };
  static_assert(sizeof(Head) == 24);

  struct Keys {
    Mac sends, receives;
    std::uint64_t sent = 0, received = 0;  // numbers of frames
  };

  static Head head_of(WireKind kind, std::size_t bytes);
  std::size_t mac_bytes() const { return keys_ ? sizeof(Mac) : 0; }
  bool is_genuine();
  bool send_some();
  bool receive_some(std::size_t max_bytes);

  FileDescriptor socket_;
  std::string outgoing_;
  std::size_t sent_ = 0;
  std::string incoming_;  // a head, then its body
  std::optional<Keys> keys_;
  bool complete_ = false;
  bool foreign_ = false;
  bool forged_ = false;
};

// Trivially copyable structs as the bodies of frames. value_of() returns nothing if the size of the body differs.
template <typename Value>
std::string_view bytes_of(const Value& value) {
  static_assert(std::is_trivially_copyable_v<Value>);
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
template <typename Value>
std::optional<Value> value_of(std::string_view bytes) {
  static_assert(std::is_trivially_copyable_v<Value>);
  if (bytes.size() != sizeof(Value)) return std::nullopt;
  Value value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

}  // namespace ringattn
