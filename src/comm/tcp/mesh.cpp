// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/mesh.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <list>
#include <optional>
#include <random>
#include <sstream>
#include <system_error>

#include "base/host.hpp"
#include "base/pulse.hpp"
#include "comm/failure.hpp"
#include "comm/meeting.hpp"
#include "comm/patience.hpp"
#include "comm/tcp/wire.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kMostAddresses = 8;
constexpr std::size_t kMostStrangers = 1024;

using Nonce = std::array<std::uint64_t, 2>;

// Which ranks a connection joins.
struct Peers {
  Nonce nonce;
  std::int32_t from;
  std::int32_t to;
};

// Equal for ranks whose loopback interface is the same.
std::string place_of_this_rank() {
  std::string boot;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::getline(file, boot);
  struct stat network = {};
  static_cast<void>(::stat("/proc/self/ns/net", &network));
  return fmt::format("{}\n{}\n{}", host_name(), boot, network.st_ino);
}

Nonce random_nonce() {
  std::random_device random;
  Nonce nonce;
  for (std::uint64_t& word : nonce) word = std::uint64_t{random()} << 32 | random();
  return nonce;
}

// Connects to the ranks below this one, and is connected to by those above.
class Connector {
 public:
  Connector(int rank, int size, const Nonce& nonce, FileDescriptor listener, const RankNames& names)
      : rank_(rank),
        nonce_(nonce),
        listener_(std::move(listener)),
        names_(names),
        links_(static_cast<std::size_t>(size)) {}

  // `addresses`: [ranks] where each may be reached.
  std::vector<FileDescriptor> connect(std::vector<std::vector<SocketAddress>> addresses, const Deadline& deadline) {
    for (int peer = 0; peer < rank_; ++peer) {
      calls_.push_back(Call{peer, std::move(addresses[static_cast<std::size_t>(peer)])});
    }
    while (open_calls() > 0 || absent_callers() > 0) {
      if (waited_enough(deadline)) fail_unreachable(deadline);
      std::vector<pollfd> sockets;
      if (strangers_.size() < kMostStrangers) sockets.push_back({listener_.get(), POLLIN, 0});
      for (const Stranger& stranger : strangers_) sockets.push_back(stranger.wire.interest());
      for (const Call& call : calls_) {
        if (call.wire) sockets.push_back(call.wire->interest());
      }
      wait_a_moment(sockets);
      for (Call& call : calls_) go_on(call);
      take_calls();
    }
    return std::move(links_);
  }

 private:
  // To a lower rank.
  struct Call {
    int peer;
    std::vector<SocketAddress> addresses;
    std::size_t at = 0;  // the address that is tried
    std::optional<Wire> wire{};
    bool asked = false;  // the connection is there, and the other side was told who calls
    Deadline deadline = Patience::none();
    bool done = false;
    std::string why_not = "nobody answers";
  };
  struct Stranger {
    Wire wire;
    Deadline deadline;
  };

  std::ptrdiff_t open_calls() const {
    return std::ranges::count_if(calls_, [](const Call& call) { return !call.done; });
  }
  std::ptrdiff_t absent_callers() const {
    return std::count_if(links_.begin() + rank_ + 1, links_.end(), [](const auto& link) { return !link.valid(); });
  }

  void next_address(Call& call, std::string why_not) {
    call.why_not = fmt::format("{}: {}", call.addresses[call.at].text(), why_not);
    call.at = (call.at + 1) % call.addresses.size();
    call.wire.reset();
    call.asked = false;
    call.deadline = Patience::for_next_try();
  }

  void go_on(Call& call) {
    if (call.done || call.addresses.empty()) return;
    const auto say = [](int error) { return std::error_code(error, std::generic_category()).message(); };
    if (!call.wire) {
      if (!call.deadline.expired()) return;
      Opened opened = begin_connection(call.addresses[call.at]);
      if (!opened.socket.valid()) return next_address(call, say(opened.error));
      call.wire.emplace(std::move(opened.socket));
      call.deadline = Patience::for_address();
      const Peers peers{nonce_, rank_, call.peer};
      call.wire->send(WireKind::kPeer, bytes_of(peers));
    }
    if (!call.asked) {
      pollfd socket{call.wire->socket().get(), POLLOUT, 0};
      if (::poll(&socket, 1, 0) <= 0) {
        if (call.deadline.expired()) next_address(call, "nobody answers");
        return;
      }
      if (const int error = connection_error(call.wire->socket()); error != 0) return next_address(call, say(error));
      call.asked = true;
      call.deadline = Patience::for_answer();
    }
    const bool open = call.wire->move(sizeof(Peers));
    if (const std::optional<WireFrame> frame = call.wire->take()) {
      const auto peers = value_of<Peers>(frame->body);
      if (frame->kind == WireKind::kPeer && peers && peers->nonce == nonce_ && peers->from == call.peer &&
          peers->to == rank_) {
        links_[static_cast<std::size_t>(call.peer)] = call.wire->take_socket();
        call.wire.reset();
        call.done = true;
        return;
      }
    }
    if (!open || call.deadline.expired()) next_address(call, open ? "no answer came" : "it is not that rank");
  }

  void take_calls() {
    if (strangers_.size() < kMostStrangers) {
      Opened opened = accept_connection(listener_);
      if (opened.socket.valid()) {
        strangers_.push_back({Wire(std::move(opened.socket)), Patience::for_answer()});
      }
    }
    for (auto at = strangers_.begin(); at != strangers_.end();) at = meet(*at) ? strangers_.erase(at) : std::next(at);
  }

  // Whether a stranger needs no more attention.
  bool meet(Stranger& stranger) {
    const bool open = stranger.wire.move(sizeof(Peers));
    const std::optional<WireFrame> frame = stranger.wire.take();
    if (!frame) return !open || stranger.deadline.expired();
    const auto peers = value_of<Peers>(frame->body);
    const auto size = static_cast<int>(links_.size());
    if (frame->kind != WireKind::kPeer || !peers || peers->nonce != nonce_ || peers->to != rank_ ||
        peers->from <= rank_ || peers->from >= size) {
      return true;
    }
    const Peers answer{nonce_, rank_, peers->from};
    stranger.wire.send(WireKind::kPeer, bytes_of(answer));
    stranger.wire.move(sizeof(Peers));  // a few bytes: they go at once
    if (!stranger.wire.all_sent()) return true;
    // A rank that has called again has given its first connection up.
    links_[static_cast<std::size_t>(peers->from)] = stranger.wire.take_socket();
    return true;
  }

  [[noreturn]] void fail_unreachable(const Deadline& deadline) const {
    const auto missing = [&](int peer, const std::string& why) {
      fail_with_pulse(Error(
          ErrorCode::kPeer,
          fmt::format("{} and {} did not connect within {:g} s", names_.name(rank_), names_.name(peer),
                      deadline.seconds()),
          why,
          {"See whether a firewall is between their hosts; raise ", setting("timeout"), " if they are only slow."}));
    };
    for (const Call& call : calls_) {
      if (!call.done) missing(call.peer, call.why_not);
    }
    for (int peer = rank_ + 1; peer < static_cast<int>(links_.size()); ++peer) {
      if (!links_[static_cast<std::size_t>(peer)].valid()) missing(peer, "it did not come");
    }
    fail(ErrorCode::kInternal, "all ranks are connected, and waited for");
  }

  const int rank_;
  const Nonce nonce_;
  const FileDescriptor listener_;
  const RankNames& names_;
  std::vector<FileDescriptor> links_;  // [ranks]
  std::vector<Call> calls_;
  std::list<Stranger> strangers_;
};

// What a rank tells the others of where it listens: its port, then a number a line.
std::vector<SocketAddress> addresses_in(const std::string& text) {
  std::vector<SocketAddress> addresses;
  std::istringstream lines(text);
  int port = 0;
  lines >> port;
  for (std::string number; addresses.size() < kMostAddresses && lines >> number;) {
    if (port < 1 || port > 65535) break;
    for (const SocketAddress& address : numeric_address(number, port)) addresses.push_back(address);
  }
  return addresses;
}

}  // namespace

Mesh connect_mesh(Bootstrap& world, const std::string& address, const Patience& patience) {
  const Meeting meeting(world, patience);
  const int rank = world.rank();
  Mesh mesh;
  bool one_host = true;
  Nonce nonce{};
  const std::string mine = place_of_this_rank();
  const Nonce own_nonce = random_nonce();
  const std::vector<std::string> texts = world.all_gather(std::string(bytes_of(own_nonce)) + mine, patience.for_peer());
  for (const std::string& text : texts) {
    const auto theirs = value_of<Nonce>(std::string_view(text).substr(0, sizeof(Nonce)));
    if (!theirs) fail(ErrorCode::kInternal, "a rank has told too little of itself");
    if (mesh.hosts.empty()) nonce = *theirs;  // rank 0's counts
    const std::string place = text.substr(sizeof(Nonce));
    one_host = one_host && place == mine;
    mesh.hosts.push_back(place.substr(0, place.find('\n')));
  }
  // That all are on one host is seen by all ranks, or by none.
  FileDescriptor listener;
  std::string told;
  meeting.together([&] {
    Opened opened;
    if (one_host) {
      for (const char* loopback : {"127.0.0.1", "::1"}) {
        const std::vector<SocketAddress> found = numeric_address(loopback, 0);
        if (!found.empty() && !opened.socket.valid()) opened = open_listener(found[0]);
      }
    } else {
      opened = open_listener_anywhere(0);
    }
    if (!opened.socket.valid()) {
      fail(ErrorCode::kUnsupported, "can't listen for the other ranks",
           std::error_code(opened.error, std::generic_category()).message(),
           "See this user's limit on open files (ulimit -n).");
    }
    listener = std::move(opened.socket);
    const SocketAddress end = own_end(listener);
    told = fmt::format("{}\n", end.port());
    if (one_host) {
      told += end.host();
    } else {
      std::vector<std::string> numbers = interface_addresses();
      if (!address.empty()) numbers.insert(numbers.begin(), address);
      if (numbers.size() > kMostAddresses) numbers.resize(kMostAddresses);
      for (const std::string& number : numbers) told += number + '\n';
    }
  });
  std::vector<std::vector<SocketAddress>> addresses;
  for (const std::string& theirs : world.all_gather(told, patience.for_peer())) {
    addresses.push_back(addresses_in(theirs));
  }
  const RankNames names(mesh.hosts);
  Connector connector(rank, world.size(), nonce, std::move(listener), names);
  // Who waits for a rank that can't connect hears of it when its time is over.
  Meeting(world, Patience::derived(2.0 * patience.seconds())).together([&] {
    mesh.links = connector.connect(std::move(addresses), patience.for_peer());
  });
  return mesh;
}

}  // namespace ringattn
