// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/store_acceptor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "base/host.hpp"

namespace ringattn {

namespace {

// Connections that have not identified themselves.
constexpr std::size_t kMaxPendingConnections = 256;
// Connections accepted in one go before the existing ones advance.
constexpr int kAcceptedAtOnce = 64;
// Refusals listed in one message.
constexpr std::size_t kNamedRefusals = 8;

constexpr std::size_t kMaxHandshake = std::max({sizeof(Hello), sizeof(Introduction), sizeof(Proof)});

MessageTemplate same_secret() { return "Give all ranks the same RINGATTN_STORE_SECRET, or none of them one."; }

}  // namespace

void StoreAcceptor::accept_from(const FileDescriptor& listener) {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    Opened opened = accept_connection(listener);
    if (!opened.socket.valid()) {
      const bool no_more_files = opened.error == EMFILE || opened.error == ENFILE;
      if (no_more_files && !pending_.empty()) pending_.pop_front();
      return;
    }
    add(std::move(opened.socket));
  }
}

void StoreAcceptor::add(FileDescriptor connection) {
  if (pending_.size() >= kMaxPendingConnections) pending_.pop_front();
  pending_.push_back({Wire(std::move(connection)), Timeouts::for_answer()});
}

void StoreAcceptor::add_interests(std::vector<pollfd>& sockets) const {
  for (const PendingConnection& pending : pending_) sockets.push_back(pending.wire.interest());
}

void StoreAcceptor::go_on() {
  for (auto at = pending_.begin(); at != pending_.end();) at = handle(*at) ? pending_.erase(at) : std::next(at);
}

// Returns true if a pending connection needs no further handling: it has joined, was refused, or is not a rank.
bool StoreAcceptor::handle(PendingConnection& pending) {
  const bool open = pending.wire.move(kMaxHandshake);
  const std::optional<WireFrame> frame = pending.wire.take();
  if (!frame) {
    if (pending.introduction && pending.wire.is_forged()) {
      note(pending.introduction->caller, "has another secret than rank 0");
    }
    return !open || pending.deadline.expired();
  }
  if (frame->kind == WireKind::kIntroduction) return take_introduction(pending, *frame);
  const auto hello = value_of<Hello>(frame->body);
  if (frame->kind != WireKind::kHello || !hello) return true;
  return take_hello(pending, *hello);
}

bool StoreAcceptor::take_introduction(PendingConnection& pending, const WireFrame& frame) {
  const auto introduction = value_of<Introduction>(frame.body);
  if (!introduction || pending.introduction || introduction->purpose != Purpose::kStore ||
      introduction->listener != 0) {
    return true;
  }
  if (!secret_.is_given()) {
    note(introduction->caller, "has a secret, and rank 0 has none");
    return refuse(pending,
                  Error(ErrorCode::kPeer, fmt::format("the store at {} takes no secret", options_.address.text()),
                        "rank 0 has none", same_secret()));
  }
  const Answer answer = answer_introduction(secret_, *introduction, {});
  pending.wire.send(WireKind::kProof, bytes_of(answer.proof));
  pending.wire.flush();
  pending.wire.authenticate(answer.keys.to_caller, answer.keys.to_listener);
  pending.introduction = introduction;
  return !pending.wire.all_sent();
}

bool StoreAcceptor::take_hello(PendingConnection& pending, const Hello& hello) {
  if (secret_.is_given() && !pending.introduction) {
    note(hello.rank, "has no secret, and rank 0 has one");
    return refuse(pending,
                  Error(ErrorCode::kPeer, fmt::format("the store at {} asks for a secret", options_.address.text()),
                        fmt::format("rank {} has none", hello.rank), same_secret()));
  }
  if (pending.introduction &&
      (pending.introduction->caller != hello.rank || pending.introduction->size != hello.size)) {
    return true;
  }
  if (const std::optional<Refusal> refusal = why_not(hello)) {
    note(hello.rank, fmt::format("on {} was refused: {}", hello.host_text(), refusal->for_rank_0));
    return refuse(pending, Error(ErrorCode::kUsage,
                                 fmt::format("the store at {} refuses rank {}", options_.address.text(), hello.rank),
                                 pending.introduction ? refusal->for_rank_0 : refusal->for_stranger,
                                 "Check what starts the ranks: each needs a number of its own, and all the same count "
                                 "of ranks and name of the job."));
  }
  refused_.erase(hello.rank);
  join_(hello, std::move(pending.wire));
  return true;
}

bool StoreAcceptor::refuse(PendingConnection& pending, const Error& error) {
  pending.wire.send(WireKind::kFailed, pack_error(error));
  pending.wire.flush();
  return true;
}

void StoreAcceptor::note(int rank, std::string why) {
  const bool known = rank >= 0 && rank < options_.size;
  refused_[known ? rank : -1] = fmt::format("a rank {} {}", rank, why);
}

std::string StoreAcceptor::refusals() const {
  std::string all;
  std::size_t named = 0;
  for (const auto& [rank, why] : refused_) {
    if (named++ == kNamedRefusals) return fmt::format("{}; and {} more", all, refused_.size() - kNamedRefusals);
    all += (all.empty() ? "" : "; ") + why;
  }
  return all;
}

// A rank that has proved nothing is told only what is wrong with its own data, and nothing about the job.
std::optional<StoreAcceptor::Refusal> StoreAcceptor::why_not(const Hello& hello) const {
  if (hello.job_text() != options_.job) {
    return Refusal{
        fmt::format("the store serves another job than {}", job_name(hello.job_text())),
        fmt::format("it belongs to {}, and the store serves {}", job_name(hello.job_text()), job_name(options_.job))};
  }
  if (hello.size != options_.size) {
    return Refusal{fmt::format("the store's world has not {} rank{}", hello.size, hello.size == 1 ? "" : "s"),
                   fmt::format("it wants a world of {} rank{}, and rank 0 one of {}", hello.size,
                               hello.size == 1 ? "" : "s", options_.size)};
  }
  if (hello.rank < 0 || hello.rank >= options_.size) {
    const std::string range = fmt::format("there are ranks 0 to {}", options_.size - 1);
    return Refusal{range, range};
  }
  if (hello.rank == 0) return Refusal{"rank 0 serves the store", fmt::format("rank 0, on {}, serves it", host_name())};
  if (!is_there_(hello.rank)) return std::nullopt;
  const std::string there = fmt::format("a rank {} is there already", hello.rank);
  return Refusal{there, there};
}

}  // namespace ringattn
