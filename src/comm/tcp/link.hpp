// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: the connection with one other rank once the world is made. Frames have a head of fixed size;
// those with data bring the bytes of a message straight from its sender's memory to its receiver's, who has said
// before that it has a destination for them. All else is small and bounded, and goes first.
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
  kGather = 1,     // `number`: of the collective; the body is this rank's part
  kReady = 2,      // a message may come: `number` is its ticket
  kData = 3,       // a fragment of it
  kHeartbeat = 4,  // of life: `shape` says which (comm/heartbeat_monitor.hpp)
  kNotice = 5,     // a rank, `round`, has failed; the body is its error, as pack_error() writes it
  kLeave = 6,      // nobody needs this rank any more
};

struct FrameHead {
  FrameKind kind = FrameKind::kLeave;
  std::uint32_t bytes = 0;  // of the body
  std::uint64_t world = 0;
  std::int64_t number = 0;
  std::uint64_t total = 0;  // bytes of the whole message
  std::uint32_t shape = 0;
  std::int32_t round = 0;
};
static_assert(sizeof(FrameHead) == 40);

// Bodies may be so large.
inline constexpr std::uint32_t kMaxGathered = std::uint32_t{64} << 20;
inline constexpr std::uint32_t kMaxNotice = 2048;
inline constexpr std::uint32_t kMaxFragment = std::uint32_t{1} << 20;

// Who is told of what a link brings. Called from within the link's own calls.
class LinkOwner {
 public:
  virtual ~LinkOwner() = default;

  struct Destination {
    std::shared_ptr<TcpFlight> flight;  // nullptr: the bytes are given up
    std::size_t receive = 0;
  };
  // Whether a frame without data may come now, before memory is taken for its body. False: nobody could have sent it in
  // order.
  virtual bool accepts_frame(int peer, const FrameHead& head) const = 0;
  // Where a fragment of data goes. False: as above.
  virtual bool find_destination(int peer, const FrameHead& head, Destination& destination) = 0;
  // A fragment is there as a whole.
  virtual void data_received(const Destination& destination) = 0;
  // Any other frame. False: as above.
  virtual bool frame_received(int peer, const FrameHead& head, std::string body) = 0;
  // A message has left as a whole.
  virtual void data_sent(const std::shared_ptr<TcpFlight>& flight, std::size_t send) = 0;
};

// Not thread-safe: its context's mutex is held.
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
  // Whether what send() was given has left.
  bool small_are_sent() const { return small_.empty() && (head_.empty() || data_frame_); }

  // Moves what can be moved at this moment; the bytes that moved. What can't be sent any more is dropped.
  std::size_t flush();
  // The same of what comes; false once nothing comes any more.
  bool receive(std::size_t& bytes);
  // Why not.
  const std::string& why_ended() const { return why_ended_; }

  // Says that nothing follows.
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

  // Outgoing: a frame's head, or a small frame as a whole, then a fragment of data.
  std::deque<std::string> small_;
  std::deque<Outgoing> large_;
  std::string head_;
  std::size_t head_sent_ = 0;
  bool data_frame_ = false;  // that the head is one of large_.front()
  std::size_t fragment_left_ = 0;
  bool mute_ = false;  // nothing can be sent any more

  // Incoming.
  FrameHead in_{};
  std::size_t in_head_ = 0;  // bytes of it
  std::size_t in_left_ = 0;  // of the body
  std::string in_body_;
  LinkOwner::Destination in_destination_;
  std::string why_ended_;
};

}  // namespace ringattn
