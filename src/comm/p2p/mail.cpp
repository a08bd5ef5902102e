// SPDX-License-Identifier: Apache-2.0
#include "comm/p2p/mail.hpp"

#include <algorithm>
#include <cstring>

namespace ringattn {

namespace {

// A letter: this, then a body of so many bytes. Both ends run the same binary.
enum class Kind : std::uint32_t { kMemory = 1, kLanding = 2 };
struct Head {
  Kind kind;
  std::uint32_t bytes;
};
struct LandingHead {
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

P2pMail::P2pMail(const P2pSegment& segment, int rank, int size)
    : segment_(segment), rank_(rank), size_(size), correspondents_(static_cast<std::size_t>(size)) {}

void P2pMail::describe(int peer, const ExportedMemory& memory) {
  std::string& outgoing = at(peer).outgoing;
  append(outgoing, Head{Kind::kMemory, sizeof memory});
  append(outgoing, memory);
  at(peer).described.insert(memory.id);
}

void P2pMail::tell(int peer, const Landing& landing) {
  std::string& outgoing = at(peer).outgoing;
  const std::size_t bytes = sizeof(LandingHead) + landing.runs.size() * sizeof(Run);
  append(outgoing, Head{Kind::kLanding, static_cast<std::uint32_t>(bytes)});
  append(outgoing, LandingHead{landing.number, landing.round, landing.ticket, landing.announced});
  for (const Run& run : landing.runs) append(outgoing, run);
}

bool P2pMail::all_sent() const {
  return std::ranges::all_of(correspondents_, [](const Correspondent& them) { return them.outgoing.empty(); });
}

const Landing* P2pMail::announced(int peer, std::int64_t exchange, int round) const {
  const auto found = at(peer).announced.find({exchange, round});
  return found == at(peer).announced.end() ? nullptr : &found->second;
}

void P2pMail::forget(int peer, std::uint64_t allocation) {
  std::erase_if(at(peer).announced, [allocation](const auto& entry) {
    const std::vector<Run>& runs = entry.second.runs;
    return std::ranges::any_of(runs, [allocation](const Run& run) { return run.allocation == allocation; });
  });
}

void P2pMail::move(P2pMemory& memory) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    Correspondent& them = at(peer);
    if (them.sent < them.outgoing.size()) {
      const std::string_view rest = std::string_view(them.outgoing).substr(them.sent);
      them.sent += segment_.mailbox(rank_, peer).write(rest);
      if (them.sent == them.outgoing.size()) {
        them.outgoing.clear();
        them.sent = 0;
      }
    }
    if (segment_.mailbox(peer, rank_).read(them.incoming)) take(peer, memory);
  }
}

// Takes the letters that are complete.
void P2pMail::take(int peer, P2pMemory& memory) {
  Correspondent& them = at(peer);
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
    const auto first = read_at<LandingHead>(them.incoming, body);
    Landing& landing = first.announced == kNotAnnounced ? them.landings.emplace_back()
                                                        : them.announced[{first.announced, first.round}];
    landing.announced = first.announced;
    landing.number = first.number;
    landing.round = first.round;
    landing.ticket = first.ticket;
    for (std::size_t run = body + sizeof first; run < done; run += sizeof(Run)) {
      landing.runs.push_back(read_at<Run>(them.incoming, run));
    }
  }
  them.incoming.erase(0, done);
}

}  // namespace ringattn
