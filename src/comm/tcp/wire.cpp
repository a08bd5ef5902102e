// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/wire.hpp"

#include <algorithm>
#include <cerrno>

namespace ringattn {

namespace {

constexpr char kMagic[8] = {'r', 'i', 'n', 'g', 'a', 't', 't', 'n'};
constexpr std::uint32_t kVersion = 1;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

Wire::Head Wire::head_of(WireKind kind, std::size_t bytes) {
  Head head{};
  std::memcpy(head.magic, kMagic, sizeof kMagic);
  head.version = kVersion;
  head.kind = static_cast<std::uint32_t>(kind);
  head.bytes = bytes;
  return head;
}

void Wire::send(WireKind kind, std::string_view body) {
  outgoing_.erase(0, sent_);
  sent_ = 0;
  const Head head = head_of(kind, body.size() + mac_bytes());
  outgoing_ += bytes_of(head);
  outgoing_ += body;
  if (keys_) {
    const Mac mac = make_mac({keys_->sends.data(), sizeof(Mac)}, {bytes_of(keys_->sent), bytes_of(head), body});
    outgoing_.append(mac.data(), mac.size());
    ++keys_->sent;
  }
}

void Wire::authenticate(const Mac& sends, const Mac& receives) {
  keys_ = Keys{sends, receives};
  forged_ = forged_ || !incoming_.empty();
  complete_ = false;
}

// Returns true if the complete frame's MAC is correct, so that a holder of the key sent it as the next frame.
bool Wire::is_genuine() {
  const std::string_view frame = incoming_;
  const std::string_view head = frame.substr(0, sizeof(Head));
  const std::string_view body = frame.substr(sizeof(Head), frame.size() - sizeof(Head) - sizeof(Mac));
  const Mac mac = make_mac({keys_->receives.data(), sizeof(Mac)}, {bytes_of(keys_->received), head, body});
  ++keys_->received;
  return is_same_mac(mac, frame.substr(frame.size() - sizeof(Mac)));
}

bool Wire::move(std::size_t max_bytes) {
  const bool sends = send_some();
  // Always receive too: a peer that has closed the connection may have sent the reason before.
  const bool receives = receive_some(max_bytes);
  return complete_ || (sends && receives);
}

bool Wire::send_some() {
  while (!all_sent()) {
    const ssize_t count = uninterrupted(
        [this] { return ::send(socket_.get(), outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_NOSIGNAL); });
    if (count < 0) return would_block();
    sent_ += static_cast<std::size_t>(count);
  }
  return true;
}

bool Wire::receive_some(std::size_t max_bytes) {
  while (!complete_ && !foreign_ && !forged_) {
    std::size_t wanted = sizeof(Head);
    if (incoming_.size() >= sizeof(Head)) {
      Head head;
      std::memcpy(&head, incoming_.data(), sizeof head);
      const bool known = head.kind >= static_cast<std::uint32_t>(WireKind::kHello) && head.kind <= kLastWireKind;
      if (!known || head.version != kVersion || head.bytes > max_bytes + mac_bytes()) {
        foreign_ = true;
        return false;
      }
      if (head.bytes < mac_bytes()) {
        forged_ = true;
        return false;
      }
      wanted += head.bytes;
      if (incoming_.size() == wanted) {
        if (keys_ && !is_genuine()) {
          forged_ = true;
          return false;
        }
        complete_ = true;
        return true;
      }
    }
    constexpr std::size_t kReceiveBytes = 65536;  // grow with the received data, not to the size that the head claims
    const std::size_t before = incoming_.size();
    incoming_.resize(before + std::min(kReceiveBytes, wanted - before));
    const ssize_t count =
        uninterrupted([&] { return ::recv(socket_.get(), incoming_.data() + before, incoming_.size() - before, 0); });
    const int error = errno;
    incoming_.resize(before + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
    errno = error;
    if (count == 0) return false;
    if (count < 0) return would_block();
    // A stranger is recognized by its first bytes.
    if (std::memcmp(incoming_.data(), kMagic, std::min(incoming_.size(), sizeof kMagic)) != 0) foreign_ = true;
  }
  return complete_;
}

std::optional<WireFrame> Wire::take() {
  if (!complete_) return std::nullopt;
  Head head;
  std::memcpy(&head, incoming_.data(), sizeof head);
  WireFrame frame{static_cast<WireKind>(head.kind),
                  incoming_.substr(sizeof head, incoming_.size() - sizeof head - mac_bytes())};
  incoming_.clear();
  complete_ = false;
  return frame;
}

}  // namespace ringattn
