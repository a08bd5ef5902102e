// SPDX-License-Identifier: Apache-2.0
// The store on rank 0: takes ranks in, refuses others, and hands round what they gather.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <optional>

#include "base/host.hpp"
#include "base/pulse.hpp"
#include "comm/failure.hpp"
#include "comm/patience.hpp"
#include "comm/tcp/store_parts.hpp"

namespace ringattn {

namespace {

// Connections that have not said who they are.
constexpr std::size_t kMostStrangers = 1024;
// How long what is said last gets to be sent.
constexpr double kFarewellSeconds = 1.0;

class StoreServer final : public Store {
 public:
  explicit StoreServer(const StoreOptions& options)
      : options_(options), hosts_(static_cast<std::size_t>(options.size)), guests_(hosts_.size()) {
    hosts_[0] = host_name();
    listen();
    try {
      take_in(Patience(options.seconds).for_peer());
    } catch (const Error& error) {
      fail_all(error);
    }
    listener_ = FileDescriptor();
    names_ = RankNames(hosts_);
  }

  int rank() const override { return 0; }
  int size() const override { return options_.size; }
  const std::vector<std::string>& hosts() const override { return hosts_; }
  std::string own_address() const override { return own_address_; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    return gather("all-gather", bytes, deadline);
  }
  void barrier(const Deadline& deadline) override { gather("barrier", {}, deadline); }

 private:
  struct Stranger {
    Wire wire;
    Deadline deadline;
  };

  // Addresses that are numbers, or are this host alone, are served as they stand. What a name means here need not be
  // what it means to others (a host often calls itself 127.0.1.1), so a name is served on all interfaces.
  void listen() {
    const auto refuse = [this](const std::string& why) {
      fail(ErrorCode::kUsage, fmt::format("rank 0 can't serve the store at {}", options_.address.text()), why,
           "Give an address of rank 0's host, and a port that nothing else uses: neither another job nor torchrun.");
    };
    const auto& [host, port] = options_.address;
    const bool here = host == "localhost";
    const Resolved resolved = here ? resolve_host(host, port) : Resolved{numeric_address(host, port), {}};
    Opened opened;
    for (const SocketAddress& address : resolved.addresses) {
      opened = open_listener(address);
      if (opened.socket.valid()) break;
    }
    if (resolved.addresses.empty()) {
      if (here) refuse(resolved.why_none);
      const Resolved named = resolve_host(host, port);
      if (named.addresses.empty()) refuse(named.why_none);
      opened = open_listener_anywhere(port);
    }
    if (!opened.socket.valid()) refuse(error_text(opened.error));
    listener_ = std::move(opened.socket);
  }

  // Until all ranks are there.
  void take_in(const Deadline& deadline) {
    std::list<Stranger> strangers;
    while (missing() > 0) {
      if (waited_enough(deadline)) fail_missing(deadline);
      std::vector<pollfd> sockets;
      if (strangers.size() < kMostStrangers) sockets.push_back({listener_.get(), POLLIN, 0});
      for (const Stranger& stranger : strangers) sockets.push_back(stranger.wire.interest());
      for (const auto& guest : guests_) {
        if (guest) sockets.push_back(guest->interest());
      }
      wait_a_moment(sockets);
      if (strangers.size() < kMostStrangers) {
        Opened opened = accept_connection(listener_);
        if (opened.socket.valid()) {
          strangers.push_back({Wire(std::move(opened.socket)), Patience::for_answer()});
        }
      }
      for (auto at = strangers.begin(); at != strangers.end();) at = meet(*at) ? strangers.erase(at) : std::next(at);
      forget_gone();
    }
    for (auto& guest : guests_) {
      if (guest) guest->send(WireKind::kComplete, pack_texts(hosts_));
    }
    flush(deadline);
  }

  // A rank that has gone before all were there may be started again.
  void forget_gone() {
    for (auto& guest : guests_) {
      if (guest && (!guest->move(sizeof(Hello)) || guest->take())) guest.reset();
    }
  }

  // Whether a stranger needs no more attention: it is a guest now, was refused, or is no rank.
  bool meet(Stranger& stranger) {
    const bool open = stranger.wire.move(sizeof(Hello));
    const std::optional<WireFrame> frame = stranger.wire.take();
    if (!frame) return !open || stranger.deadline.expired();
    const auto hello = value_of<Hello>(frame->body);
    if (frame->kind != WireKind::kHello || !hello) return true;
    forget_gone();  // the one before it with this number may have ended since guests were looked at
    const std::string why = why_not(*hello);
    if (!why.empty()) {
      refused_ = fmt::format("a rank {} on {} was refused: {}", hello->rank, hello->host_text(), why);
      const Error error(ErrorCode::kUsage,
                        fmt::format("the store at {} refuses rank {}", options_.address.text(), hello->rank), why,
                        "Check what starts the ranks: each needs a number of its own, and all the same count of "
                        "ranks and name of the job.");
      stranger.wire.send(WireKind::kFailed, pack_error(error));
      stranger.wire.move(sizeof(Hello));
      return true;
    }
    const auto rank = static_cast<std::size_t>(hello->rank);
    hosts_[rank] = hello->host_text();
    const SocketAddress mine = own_end(stranger.wire.socket());
    if (own_address_.empty() || !mine.is_loopback()) own_address_ = mine.host();
    guests_[rank].emplace(std::move(stranger.wire));
    return true;
  }

  std::string why_not(const Hello& hello) const {
    if (hello.job_text() != options_.job) {
      return fmt::format("it belongs to {}, and the store serves {}", job_name(hello.job_text()),
                         job_name(options_.job));
    }
    if (hello.size != options_.size) {
      return fmt::format("it wants a world of {} rank{}, and rank 0 one of {}", hello.size, hello.size == 1 ? "" : "s",
                         options_.size);
    }
    if (hello.rank < 0 || hello.rank >= options_.size) return fmt::format("there are ranks 0 to {}", options_.size - 1);
    if (hello.rank == 0) return fmt::format("rank 0, on {}, serves the store", hosts_[0]);
    const auto rank = static_cast<std::size_t>(hello.rank);
    return guests_[rank] ? fmt::format("a rank {} on {} is there already", hello.rank, hosts_[rank]) : std::string();
  }

  int missing() const {
    return options_.size - 1 -
           static_cast<int>(std::ranges::count_if(guests_, [](const auto& guest) { return guest.has_value(); }));
  }

  [[noreturn]] void fail_missing(const Deadline& deadline) const {
    std::vector<int> absent;
    for (int rank = 1; rank < options_.size; ++rank) {
      if (!guests_[static_cast<std::size_t>(rank)]) absent.push_back(rank);
    }
    fail_with_pulse(Error(ErrorCode::kPeer,
                          fmt::format("{} did not come to the store at {} within {:g} s", RankNames().list(absent),
                                      options_.address.text(), deadline.seconds()),
                          refused_.empty() ? fmt::format("{} of {} ranks came",
                                                         options_.size - static_cast<int>(absent.size()), options_.size)
                                           : refused_,
                          {"See whether all ranks were started and can reach that address; raise ", setting("timeout"),
                           " if they only start slowly."}));
  }

  std::vector<std::string> gather(std::string_view what, std::string_view bytes, const Deadline& deadline) {
    try {
      return collect(what, bytes, deadline);
    } catch (const Error& error) {
      fail_all(error);
    }
  }

  std::vector<std::string> collect(std::string_view what, std::string_view bytes, const Deadline& deadline) {
    std::vector<std::optional<std::string>> parts(hosts_.size());
    parts[0] = bytes;
    const auto absent = [&] {
      std::vector<int> ranks;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (!parts[i]) ranks.push_back(static_cast<int>(i));
      }
      return ranks;
    };
    for (std::vector<int> waited_for = absent(); !waited_for.empty(); waited_for = absent()) {
      if (waited_enough(deadline)) fail_late(what, deadline, names_, 0, waited_for);
      std::vector<pollfd> sockets;
      for (const int rank : waited_for) sockets.push_back(guests_[static_cast<std::size_t>(rank)]->interest());
      wait_a_moment(sockets);
      for (const int rank : waited_for) {
        Wire& guest = *guests_[static_cast<std::size_t>(rank)];
        const bool open = guest.move(kMostStorePart);
        std::optional<WireFrame> frame = guest.take();
        if (frame && frame->kind == WireKind::kGather) {
          parts[static_cast<std::size_t>(rank)] = std::move(frame->body);
        } else if (frame || !open) {
          fail(ErrorCode::kPeer, fmt::format("{} left while the ranks came together", names_.name(rank)),
               "its connection to the store has closed", "See its own message.");
        }
      }
    }
    std::vector<std::string> all;
    for (auto& part : parts) all.push_back(std::move(*part));
    const std::string packed = pack_texts(all);
    for (auto& guest : guests_) {
      if (guest) guest->send(WireKind::kGathered, packed);
    }
    flush(deadline);
    return all;
  }

  // Until all guests have been sent what they were told.
  void flush(const Deadline& deadline) {
    for (;;) {
      std::vector<pollfd> sockets;
      for (auto& guest : guests_) {
        // A guest that has gone shows in the next all-gather.
        if (guest && !guest->all_sent() && guest->move(kMostStorePart) && !guest->all_sent()) {
          sockets.push_back(guest->interest());
        }
      }
      if (sockets.empty() || deadline.expired()) return;
      wait_a_moment(sockets);
    }
  }

  // The error reaches all ranks that are there, as rank 0's.
  [[noreturn]] void fail_all(const Error& error) {
    Error told = error;
    if (told.place() == nullptr) told.set_place({0, host_name()});
    for (auto& guest : guests_) {
      if (guest) guest->send(WireKind::kFailed, pack_error(told));
    }
    flush(Patience::grace(kFarewellSeconds));
    throw Error(told);
  }

  const StoreOptions options_;
  std::vector<std::string> hosts_;           // [size]
  std::vector<std::optional<Wire>> guests_;  // [size]; never rank 0
  RankNames names_;
  FileDescriptor listener_;
  std::string own_address_;
  std::string refused_;  // the last rank that was, and why
};

}  // namespace

std::unique_ptr<Store> serve_store(const StoreOptions& options) { return std::make_unique<StoreServer>(options); }

}  // namespace ringattn
