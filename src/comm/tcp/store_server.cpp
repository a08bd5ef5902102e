// SPDX-License-Identifier: Apache-2.0
// The store on rank 0: accepts ranks, refuses others, and runs their all-gathers.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "base/host.hpp"
#include "base/rank_liveness.hpp"
#include "comm/failure.hpp"
#include "comm/tcp/store_acceptor.hpp"
#include "comm/tcp/store_internal.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

// How long the last frames may take to be sent.
constexpr double kFinalSendSeconds = 1.0;

class StoreServer final : public Store {
 public:
  StoreServer(const StoreOptions& options, const Secret& secret)
      : options_(options),
        secret_(secret),
        hosts_(static_cast<std::size_t>(options.size)),
        connections_(hosts_.size()),
        session_(make_session()) {
    hosts_[0] = host_name();
    listen();
    warn();
    try {
      accept_ranks(Timeouts(options.seconds).for_peer());
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
  const std::string& session() const override { return session_; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    return gather("all-gather", bytes, deadline);
  }
  void barrier(const Deadline& deadline) override { gather("barrier", {}, deadline); }

 private:
  static std::string make_session() {
    std::string text;
    for (const char byte : make_nonce()) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    return text;
  }

  void warn() const {
    if (secret_.is_given() || options_.size == 1 || !options_.warn || local_address(listener_).is_loopback()) return;
    options_.warn(
        {fmt::format("any process that can connect to {} may join this job as a rank", options_.address.text()),
         " (RINGATTN_STORE_SECRET is not set). ",
         "Give all ranks the same secret, as docs/security.md says, or keep that port from others."});
  }

  // Numeric addresses and "localhost" are served as they are. A host name may resolve differently here than on other
  // hosts (a host often resolves its own name to 127.0.1.1), so a name is served on all interfaces.
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

  // Returns when all ranks are connected.
  void accept_ranks(const Deadline& deadline) {
    StoreAcceptor acceptor(
        options_, secret_,
        [this](int rank) {
          drop_closed();  // an earlier rank with this number may have ended since the last poll
          return connections_[static_cast<std::size_t>(rank)].has_value();
        },
        [this](const Hello& hello, Wire wire) { join(hello, std::move(wire)); });
    while (missing() > 0) {
      if (wait_expired(deadline)) fail_missing(deadline, acceptor.refusals());
      std::vector<pollfd> sockets{{listener_.get(), POLLIN, 0}};
      acceptor.add_interests(sockets);
      for (const auto& connection : connections_) {
        if (connection) sockets.push_back(connection->interest());
      }
      poll_briefly(sockets);
      acceptor.accept_from(listener_);
      acceptor.go_on();
      drop_closed();
    }
    std::vector<std::string> texts = hosts_;
    texts.push_back(session_);
    for (auto& connection : connections_) {
      if (connection) connection->send(WireKind::kComplete, pack_texts(texts));
    }
    flush(deadline);
  }

  void join(const Hello& hello, Wire wire) {
    const auto rank = static_cast<std::size_t>(hello.rank);
    hosts_[rank] = hello.host_text();
    const SocketAddress mine = local_address(wire.socket());
    if (own_address_.empty() || !mine.is_loopback()) own_address_ = mine.host();
    connections_[rank].emplace(std::move(wire));
  }

  // A rank that has ended before all were connected may be started again.
  void drop_closed() {
    for (auto& connection : connections_) {
      if (connection && (!connection->move(0) || connection->take())) connection.reset();
    }
  }

  int missing() const {
    return options_.size - 1 - static_cast<int>(std::ranges::count_if(connections_, [](const auto& connection) {
             return connection.has_value();
           }));
  }

  [[noreturn]] void fail_missing(const Deadline& deadline, const std::string& refusals) const {
    std::vector<int> absent;
    for (int rank = 1; rank < options_.size; ++rank) {
      if (!connections_[static_cast<std::size_t>(rank)]) absent.push_back(rank);
    }
    fail_rank(Error(ErrorCode::kPeer,
                    fmt::format("{} did not come to the store at {} within {:g} s", RankNames().list(absent),
                                options_.address.text(), deadline.seconds()),
                    refusals.empty() ? fmt::format("{} of {} ranks came",
                                                   options_.size - static_cast<int>(absent.size()), options_.size)
                                     : refusals,
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
    // The first rank whose time limit expires ends the wait, so that rank 0 reports it to all.
    Deadline limit = deadline;
    for (std::vector<int> waited_for = absent(); !waited_for.empty(); waited_for = absent()) {
      if (wait_expired(limit)) fail_late(what, limit, names_, 0, waited_for);
      std::vector<pollfd> sockets;
      for (const int rank : waited_for) sockets.push_back(connections_[static_cast<std::size_t>(rank)]->interest());
      poll_briefly(sockets);
      for (const int rank : waited_for) {
        Wire& connection = *connections_[static_cast<std::size_t>(rank)];
        const bool open = connection.move(kMaxStoreMessage);
        std::optional<WireFrame> frame = connection.take();
        if (frame && frame->kind == WireKind::kGather) {
          parts[static_cast<std::size_t>(rank)] = std::move(frame->body);
        } else if (const auto seconds = frame ? wait_of(*frame) : std::nullopt) {
          const Deadline theirs = Timeouts::grace(*seconds);
          if (theirs.end() < limit.end()) limit = theirs;
        } else if (frame || !open) {
          fail(ErrorCode::kPeer, fmt::format("{} left while the ranks connected", names_.name(rank)),
               connection.is_forged() ? "what it sent was changed in transit"
               : frame                ? "it has sent a frame out of order"
                                      : "its connection to the store has closed",
               "See its own message.");
        }
      }
    }
    std::vector<std::string> all;
    for (auto& part : parts) all.push_back(std::move(*part));
    const std::string packed = pack_texts(all);
    for (auto& connection : connections_) {
      if (connection) connection->send(WireKind::kGathered, packed);
    }
    flush(deadline);
    return all;
  }

  // The seconds that a rank waits for the next all-gather.
  static std::optional<double> wait_of(const WireFrame& frame) {
    if (frame.kind != WireKind::kWait) return std::nullopt;
    const auto seconds = value_of<double>(frame.body);
    return seconds && *seconds >= 0.0 ? seconds : std::nullopt;
  }

  // Sends all queued frames.
  void flush(const Deadline& deadline) {
    for (;;) {
      std::vector<pollfd> sockets;
      for (auto& connection : connections_) {
        // A closed connection is noticed in the next all-gather.
        if (connection && !connection->all_sent() && connection->move(kMaxStoreMessage) && !connection->all_sent()) {
          sockets.push_back(connection->interest());
        }
      }
      if (sockets.empty() || deadline.expired()) return;
      poll_briefly(sockets);
    }
  }

  // Sends the error to all connected ranks, as rank 0's.
  [[noreturn]] void fail_all(const Error& error) {
    Error located = error;
    if (located.location() == nullptr) located.set_location({0, host_name()});
    for (auto& connection : connections_) {
      if (connection) connection->send(WireKind::kFailed, pack_error(located));
    }
    flush(Timeouts::grace(kFinalSendSeconds));
    throw Error(located);
  }

  const StoreOptions options_;
  const Secret secret_;
  std::vector<std::string> hosts_;                // [size]
  std::vector<std::optional<Wire>> connections_;  // [size]; none for rank 0
  RankNames names_;
  FileDescriptor listener_;
  std::string own_address_;
  const std::string session_;
};

}  // namespace

std::unique_ptr<Store> serve_store(const StoreOptions& options, const Secret& secret) {
  return std::make_unique<StoreServer>(options, secret);
}

}  // namespace ringattn
