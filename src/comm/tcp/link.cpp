// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/link.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

namespace ringattn {

namespace {

constexpr std::size_t kMaxCallBytes = std::size_t{256} << 10;  // max bytes of one system call
constexpr std::size_t kMaxTurnBytes = std::size_t{1} << 20;  // max bytes of one link before the other links are served
constexpr std::size_t kMaxIovecs = 64;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

constexpr std::size_t kDiscardBytes = 65536;  // bytes discarded at a time

// A thread-local buffer of kDiscardBytes bytes, used in place of spans that were given up.
std::byte* discard_buffer() {
  static thread_local std::vector<std::byte> bytes(kDiscardBytes);
  return bytes.data();
}

bool fits(const FrameHead& head) {
  switch (head.kind) {
    case FrameKind::kGather:
      return head.bytes <= kMaxGathered;
    case FrameKind::kData:
      return head.bytes <= kMaxFragment;
    case FrameKind::kNotice:
      return head.bytes <= kMaxNotice;
    case FrameKind::kReady:
    case FrameKind::kHeartbeat:
    case FrameKind::kLeave:
      return head.bytes == 0;
  }
  return false;
}

}  // namespace

void TcpLink::send(FrameHead head, std::string_view body) {
  if (mute_ || !is_open()) return;
  head.bytes = static_cast<std::uint32_t>(body.size());
  std::string frame(reinterpret_cast<const char*>(&head), sizeof head);
  frame += body;
  small_.push_back(std::move(frame));
}

void TcpLink::send_data(std::shared_ptr<TcpFlight> flight, std::size_t send) {
  if (mute_ || !is_open()) return;
  large_.push_back({std::move(flight), send});
}

// Makes the next frame the current one. Returns false if there is none.
bool TcpLink::begin_frame() {
  head_sent_ = 0;
  data_frame_ = false;
  if (!small_.empty()) {
    head_ = std::move(small_.front());
    small_.pop_front();
    return true;
  }
  while (!large_.empty() && large_.front().flight->withdrawn) large_.pop_front();
  if (large_.empty()) return false;
  const TcpFlight& flight = *large_.front().flight;
  const SendMessage& message = flight.exchange.sends[large_.front().send];
  FrameHead head;
  head.kind = FrameKind::kData;
  head.world = flight.world;
  head.number = flight.ticket;
  head.round = message.round;
  fragment_left_ = std::min<std::size_t>(flight.sends[large_.front().send].left, kMaxFragment);
  head.bytes = static_cast<std::uint32_t>(fragment_left_);
  head_.assign(reinterpret_cast<const char*>(&head), sizeof head);
  data_frame_ = true;
  return true;
}

void TcpLink::end_data_frame() {
  data_frame_ = false;
  const Outgoing out = large_.front();
  if (out.flight->withdrawn) {
    large_.pop_front();
  } else if (out.flight->sends[out.send].left == 0) {
    large_.pop_front();
    owner_->data_sent(out.flight, out.send);
  }
}

std::size_t TcpLink::flush() {
  std::size_t moved = 0;
  while (is_open() && !mute_ && moved < kMaxTurnBytes) {
    if (head_.empty() && fragment_left_ == 0 && !begin_frame()) break;
    msghdr message{};
    std::array<iovec, kMaxIovecs> iovecs;
    message.msg_iov = iovecs.data();
    int flags = MSG_NOSIGNAL;
    if (!head_.empty()) {
      iovecs[0] = {head_.data() + head_sent_, head_.size() - head_sent_};
      message.msg_iovlen = 1;
      if (fragment_left_ > 0) flags |= MSG_MORE;
    } else {
      TcpFlight& flight = *large_.front().flight;
      const std::size_t send = large_.front().send;
      if (flight.withdrawn) {
        // A started frame is completed. Its receiver learns otherwise that the world has failed.
        iovecs[0] = {discard_buffer(), std::min(kDiscardBytes, fragment_left_)};
        message.msg_iovlen = 1;
      } else {
        message.msg_iovlen = flight.sends[send].cursor.fill_iovecs(flight.exchange.sends[send].spans, iovecs,
                                                                   std::min(kMaxCallBytes, fragment_left_));
      }
    }
    const ssize_t count = uninterrupted([&] { return ::sendmsg(socket_.get(), &message, flags); });
    if (count < 0) {
      if (!would_block()) drop_outgoing();  // data received before the error is still handled
      break;
    }
    const auto bytes = static_cast<std::size_t>(count);
    moved += bytes;
    if (!head_.empty()) {
      head_sent_ += bytes;
      if (head_sent_ < head_.size()) continue;
      head_.clear();
    } else {
      TcpFlight& flight = *large_.front().flight;
      const std::size_t send = large_.front().send;
      fragment_left_ -= bytes;
      if (!flight.withdrawn) {
        flight.sends[send].cursor.advance(flight.exchange.sends[send].spans, bytes);
        flight.sends[send].left -= bytes;
      }
    }
    if (data_frame_ && head_.empty() && fragment_left_ == 0) end_data_frame();
  }
  return moved;
}

void TcpLink::drop_outgoing() {
  mute_ = true;
  small_.clear();
  large_.clear();
  head_.clear();
  fragment_left_ = 0;
  data_frame_ = false;
}

bool TcpLink::end(std::string why) {
  why_ended_ = std::move(why);
  return false;
}

bool TcpLink::receive(std::size_t& bytes) {
  for (std::size_t moved = 0; is_open() && moved < kMaxTurnBytes;) {
    std::array<iovec, kMaxIovecs> iovecs;
    msghdr message{};
    message.msg_iov = iovecs.data();
    message.msg_iovlen = 1;
    const std::size_t body_before = in_body_.size();
    TcpFlight* const flight = in_destination_.flight.get();
    const bool head = in_head_ < sizeof in_;
    const bool to_spans = !head && in_.kind == FrameKind::kData && flight != nullptr && !flight->withdrawn;
    if (head) {
      iovecs[0] = {reinterpret_cast<char*>(&in_) + in_head_, sizeof in_ - in_head_};
    } else if (to_spans) {
      const auto& spans = flight->exchange.receives[in_destination_.receive].spans;
      message.msg_iovlen = flight->receives[in_destination_.receive].cursor.fill_iovecs(
          spans, iovecs, std::min(kMaxCallBytes, in_left_));
    } else if (in_.kind == FrameKind::kData) {
      iovecs[0] = {discard_buffer(), std::min(kDiscardBytes, in_left_)};
    } else {
      in_body_.resize(body_before + std::min(kDiscardBytes, in_left_));
      iovecs[0] = {in_body_.data() + body_before, in_body_.size() - body_before};
    }
    const ssize_t count = uninterrupted([&] { return ::recvmsg(socket_.get(), &message, 0); });
    const int error = errno;
    const auto got = static_cast<std::size_t>(std::max<ssize_t>(count, 0));
    if (!head && in_.kind != FrameKind::kData) in_body_.resize(body_before + got);
    if (count == 0) return end("its connection has closed");
    if (count < 0) {
      errno = error;
      return would_block() || end(std::error_code(error, std::generic_category()).message());
    }
    moved += got;
    bytes += got;
    if (head) {
      in_head_ += got;
      if (in_head_ == sizeof in_ && !take_head()) return false;
    } else {
      in_left_ -= got;
      if (to_spans) {
        TcpFlight::Receive& receive = flight->receives[in_destination_.receive];
        receive.cursor.advance(flight->exchange.receives[in_destination_.receive].spans, got);
        receive.left -= got;
      }
    }
    if (in_head_ == sizeof in_ && in_left_ == 0 && !take_body()) return false;
  }
  return is_open();
}

bool TcpLink::take_head() {
  if (!fits(in_)) return end("it has sent an invalid frame");
  in_left_ = in_.bytes;
  if (in_.kind == FrameKind::kData) {
    return owner_->find_destination(peer_, in_, in_destination_) ||
           end("it has sent data that this rank does not wait for");
  }
  return owner_->accepts_frame(peer_, in_) || end("it has sent a frame out of order");
}

bool TcpLink::take_body() {
  in_head_ = 0;
  if (in_.kind == FrameKind::kData) {
    const LinkOwner::Destination destination = std::move(in_destination_);
    in_destination_ = {};
    if (destination.flight != nullptr) owner_->data_received(destination);
    return true;
  }
  return owner_->frame_received(peer_, in_, std::exchange(in_body_, {})) || end("it has sent a frame out of order");
}

void TcpLink::shut_down() { static_cast<void>(::shutdown(socket_.get(), SHUT_WR)); }

}  // namespace ringattn
