// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: the connection to one other rank once the world is made. Frames have a fixed-size head. Data
// frames carry a message's bytes from the sender's memory directly to the receiver's, after the receiver has announced
// a destination for them (kReady). All other frames are small and bounded, and are sent first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "base/file_descriptor.hpp"
#include "comm/tcp/flight.hpp"

namespace ringattn {

enum class FrameKind : std::uint32_t {
  kGather = 1,     // `number` identifies the collective; the body is this rank's part
  kReady = 2,      // the receiver of message `number` (a ticket) and `round` has posted its side
  kData = 3,       // a fragment of that message
  kHeartbeat = 4,  // `shape` is its kind (comm/heartbeat_monitor.hpp)
  kNotice = 5,     // rank `round` has failed; the body is its error, as pack_error() writes it
  kLeave = 6,      // the sender leaves in order
};

struct FrameHead {
  FrameKind kind = FrameKind::kLeave;
  std::uint32_t bytes = 0;  // length of the body
  std::uint64_t world = 0;
  std::int64_t number = 0;
  std::uint64_t total = 0;  // bytes of the whole message
  std::uint32_t shape = 0;
  std::int32_t round = 0;
};
static_assert(sizeof(FrameHead) == 40);

// The maximum body sizes, in bytes.
inline constexpr std::uint32_t kMaxGathered = std::uint32_t{64} << 20;
inline constexpr std::uint32_t kMaxNotice = 2048;
inline constexpr std::uint32_t kMaxFragment = std::uint32_t{1} << 20;

// Receives what a link delivers. Called from within the link's own calls.
class LinkOwner {
 public:
  virtual ~LinkOwner() = default;

  struct Destination {
    std::shared_ptr<TcpFlight> flight;  // nullptr: the bytes are discarded
    std::size_t receive = 0;
  };
  // Called before memory is allocated for the body of a frame without data. Returns false if no correct peer could send
  // the frame now.
  virtual bool accepts_frame(int peer, const FrameHead& head) const = 0;
  // Finds the destination of a data fragment. Returns false as above.
  virtual bool find_destination(int peer, const FrameHead& head, Destination& destination) = 0;
  // A data fragment has arrived completely.
  virtual void data_received(const Destination& destination) = 0;
  // Any other frame has arrived. Returns false as above.
  virtual bool frame_received(int peer, const FrameHead& head, std::string body) = 0;
  // All bytes of a message have been sent.
  virtual void data_sent(const std::shared_ptr<TcpFlight>& flight, std::size_t send) = 0;
};

// Not thread-safe: the caller holds the context's mutex.
class TcpLink {
 public:
  TcpLink(int peer, FileDescriptor socket, LinkOwner& owner)
      : peer_(peer), socket_(std::move(socket)), owner_(&owner) {}

  int peer() const { return peer_; }
  int fd() const { return socket_.get(); }
  bool is_open() const { return socket_.valid(); }

  void send(FrameHead head, std::string_view body = {});
  void send_data(std::shared_ptr<TcpFlight> flight, std::size_t send);
  bool wants_to_send() const { return !head_.empty() || !small_.empty() || !large_.empty() || fragment_left_ > 0; }
  // Returns true if all frames of send() have left.
  bool small_frames_sent() const { return small_.empty() && (head_.empty() || data_frame_); }

  // Sends what can be sent without blocking, and returns the number of bytes. After an error all outgoing data is
  // dropped.
  std::size_t flush();
  // Receives what can be received without blocking, and adds the number of bytes to `bytes`. Returns false once the
  // connection has ended.
  bool receive(std::size_t& bytes);
  // Why receive() returned false.
  const std::string& why_ended() const { return why_ended_; }

  // Shuts down the sending direction.
  void shut_down();
  void close() { socket_ = FileDescriptor(); }

 private:
  struct Outgoing {
    std::shared_ptr<TcpFlight> flight;
    std::size_t send;
  };

  bool begin_frame();
  void end_data_frame();
  void drop_outgoing();
  bool end(std::string why);
  bool take_head();
  bool take_body();

  const int peer_;
  FileDescriptor socket_;
  LinkOwner* owner_;

  // Outgoing: a frame's head, or a whole small frame, then a data fragment.
  std::deque<std::string> small_;
  std::deque<Outgoing> large_;
  std::string head_;
  std::size_t head_sent_ = 0;
  bool data_frame_ = false;  // head_ belongs to large_.front()
  std::size_t fragment_left_ = 0;
  bool mute_ = false;  // nothing can be sent any more

  // Incoming.
  FrameHead in_{};
  std::size_t in_head_ = 0;  // bytes of the head received
  std::size_t in_left_ = 0;  // bytes of the body to come
  std::string in_body_;
  LinkOwner::Destination in_destination_;
  std::string why_ended_;
};

}  // namespace ringattn
