// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: what goes over a connection while ranks come together. Frames have a head of fixed size and a
// body of bounded size; a connection that brings anything else is of no rank, and is closed. Where the job has a
// secret, each frame after the handshake (comm/tcp/handshake.hpp) ends with a MAC of its number, head and body.
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
  kHello = 1,     // to the store: who comes
  kComplete = 2,  // from the store: all have come
  kFailed = 3,    // from the store: an error, as pack_error() writes it
  kGather = 4,    // to the store: this rank's part of an all-gather
  kGathered = 5,  // from the store: all parts
  kPeer = 6,      // between two ranks: who they are
  // With a secret, and for what a rank of one version need not know (comm/tcp/store_internal.hpp).
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
  // Bodies may be so large.
  static constexpr std::size_t kMaxBytes = std::size_t{16} << 20;

  explicit Wire(FileDescriptor socket) : socket_(std::move(socket)) {}

  const FileDescriptor& socket() const { return socket_; }
  FileDescriptor take_socket() { return std::move(socket_); }

  // Sends with the next calls of move() or flush().
  void send(WireKind kind, std::string_view body);
  // Sends what can be sent at this moment, and takes nothing. A few bytes go at once.
  void flush() { send_some(); }
  // Moves what can be moved at this moment. False once the other side has closed the connection, or has sent what is no
  // frame, or one with a body of more than `max_bytes`.
  bool move(std::size_t max_bytes = kMaxBytes);
  // The next frame that has come. It is taken from the connection byte by byte: nothing after it is lost.
  std::optional<WireFrame> take();

  // From the next frame on, in both directions, frames have MACs. What has been received already counts as forged: it
  // came before the other side could make one.
  void authenticate(const Mac& sends, const Mac& receives);
  bool is_authenticated() const { return keys_.has_value(); }

  // Whether what came is no frame of ringattn.
  bool is_foreign() const { return foreign_; }
  // Whether a frame came whose MAC is wrong.
  bool is_forged() const { return forged_; }
  bool all_sent() const { return sent_ == outgoing_.size(); }
  // For poll().
  pollfd interest() const { return {socket_.get(), static_cast<short>(all_sent() ? POLLIN : POLLIN | POLLOUT), 0}; }

 private:
  struct Head {
    char magic[8];
    std::uint32_t version;  // also the byte order
    std::uint32_t kind;
    std::uint64_t bytes;
  };
  static_assert(sizeof(Head) == 24);

  struct Keys {
    Mac sends, receives;
    std::uint64_t sent = 0, received = 0;  // frames
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

// Plain structs as the bodies of frames. A body of another size is no such struct.
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
