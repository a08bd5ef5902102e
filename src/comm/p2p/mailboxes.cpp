// SPDX-License-Identifier: Apache-2.0
#include "comm/p2p/mailboxes.hpp"

#include <algorithm>
#include <cstring>

namespace ringattn {

namespace {

// A mailbox message: a Head, then a body of `bytes` bytes. Both ends run the same binary.
enum class Kind : std::uint32_t { kMemory = 1, kReceiveNotice = 2 };
struct Head {
  Kind kind;
  std::uint32_t bytes;
};
struct ReceiveNoticeHead {
  std::uint32_t number;
  std::int32_t round;
  std::int64_t ticket;
  std::int64_t announced;
};

template <typename T>
void append(std::string& text, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <typename T>
T read_at(const std::string& text, std::size_t at) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  std::memcpy(&value, text.data() + at, sizeof value);
  return value;
}

}  // namespace

P2pMailboxes::P2pMailboxes(const P2pSegment& segment, int rank, int size)
    : segment_(segment), rank_(rank), size_(size), peers_(static_cast<std::size_t>(size)) {}

void P2pMailboxes::describe(int peer, const ExportedMemory& memory) {
  std::string& outgoing = at(peer).outgoing;
  append(outgoing, Head{Kind::kMemory, sizeof memory});
  append(outgoing, memory);
  at(peer).described.insert(memory.id);
}

void P2pMailboxes::post(int peer, const ReceiveNotice& notice) {
  std::string& outgoing = at(peer).outgoing;
  const std::size_t bytes = sizeof(ReceiveNoticeHead) + notice.runs.size() * sizeof(Run);
  append(outgoing, Head{Kind::kReceiveNotice, static_cast<std::uint32_t>(bytes)});
  append(outgoing, ReceiveNoticeHead{notice.number, notice.round, notice.ticket, notice.announced});
  for (const Run& run : notice.runs) append(outgoing, run);
}

bool P2pMailboxes::all_sent() const {
  return std::ranges::all_of(peers_, [](const MailboxPeer& them) { return them.outgoing.empty(); });
}

const ReceiveNotice* P2pMailboxes::announced(int peer, std::int64_t exchange, int round) const {
  const auto found = at(peer).announced.find({exchange, round});
  return found == at(peer).announced.end() ? nullptr : &found->second;
}

void P2pMailboxes::forget(int peer, std::uint64_t allocation) {
  std::erase_if(at(peer).announced, [allocation](const auto& entry) {
    const std::vector<Run>& runs = entry.second.runs;
    return std::ranges::any_of(runs, [allocation](const Run& run) { return run.allocation == allocation; });
  });
}

void P2pMailboxes::move(P2pMemory& memory) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    MailboxPeer& them = at(peer);
    if (them.sent < them.outgoing.size()) {
      const std::string_view rest = std::string_view(them.outgoing).substr(them.sent);
      them.sent += segment_.mailbox(rank_, peer).write(rest);
      if (them.sent == them.outgoing.size()) {
        them.outgoing.clear();
        them.sent = 0;
      }
    }
    if (segment_.mailbox(peer, rank_).read(them.incoming)) receive(peer, memory);
  }
}

// Handles the complete messages.
void P2pMailboxes::receive(int peer, P2pMemory& memory) {
  MailboxPeer& them = at(peer);
  std::size_t done = 0;
  while (them.incoming.size() - done >= sizeof(Head)) {
    const auto head = read_at<Head>(them.incoming, done);
    const std::size_t body = done + sizeof(Head);
    if (them.incoming.size() - body < head.bytes) break;
    done = body + head.bytes;
    if (head.kind == Kind::kMemory) {
      memory.import_from(peer, read_at<ExportedMemory>(them.incoming, body));
      continue;
    }
    const auto first = read_at<ReceiveNoticeHead>(them.incoming, body);
    ReceiveNotice& notice =
        first.announced == kNotAnnounced ? them.notices.emplace_back() : them.announced[{first.announced, first.round}];
    notice.announced = first.announced;
    notice.number = first.number;
    notice.round = first.round;
    notice.ticket = first.ticket;
    for (std::size_t run = body + sizeof first; run < done; run += sizeof(Run)) {
      notice.runs.push_back(read_at<Run>(them.incoming, run));
    }
  }
  them.incoming.erase(0, done);
}

}  // namespace ringattn
