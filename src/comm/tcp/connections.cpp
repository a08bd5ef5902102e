// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/connections.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <list>
#include <optional>
#include <sstream>
#include <system_error>

#include "base/failpoint.hpp"
#include "base/host.hpp"
#include "base/rank_liveness.hpp"
#include "comm/collective.hpp"
#include "comm/failure.hpp"
#include "comm/tcp/handshake.hpp"
#include "comm/tcp/store_internal.hpp"
#include "comm/tcp/wire.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kMaxAddresses = 8;
// Connections that have not identified themselves. Beyond this number the oldest one is closed.
constexpr std::size_t kMaxPendingConnections = 256;
constexpr int kAcceptedAtOnce = 64;
// How long a rank that could not connect waits for the others, whose own time limits expire at about the same time.
constexpr double kAgreeSeconds = 2.0;
// The line by which a rank reports that it has a secret.
constexpr std::string_view kHasSecret = "secret";

// Identifies the connection of two ranks of a world.
struct Peers {
  WorldNumber world;
  std::int32_t from;
  std::int32_t to;
};

// Equal for ranks that share a loopback interface.
std::string network_id_of_this_rank() {
  std::string boot;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::getline(file, boot);
  struct stat network = {};
  static_cast<void>(::stat("/proc/self/ns/net", &network));
  return fmt::format("{}\n{}\n{}", host_name(), boot, network.st_ino);
}

WorldNumber random_world() {
  WorldNumber number{};
  std::memcpy(number.data(), make_nonce().data(), sizeof number);
  return number;
}

// Connects to all lower ranks and accepts connections from all higher ranks.
class Connector {
 public:
  Connector(int rank, int size, const WorldNumber& world, const Secret& secret, FileDescriptor listener,
            const RankNames& names)
      : rank_(rank),
        world_(world),
        secret_(secret),
        listener_(std::move(listener)),
        names_(names),
        links_(static_cast<std::size_t>(size)) {}

  // `addresses`: [ranks], the addresses at which each may be reached.
  std::vector<FileDescriptor> connect(std::vector<std::vector<SocketAddress>> addresses, const Deadline& deadline) {
    failpoint("connecting");
    for (int peer = 0; peer < rank_; ++peer) {
      calls_.push_back(Call{peer, std::move(addresses[static_cast<std::size_t>(peer)])});
    }
    while (open_calls() > 0 || absent_callers() > 0) {
      if (wait_expired(deadline)) fail_unreachable(deadline);
      std::vector<pollfd> sockets;
      sockets.push_back({listener_.get(), POLLIN, 0});
      for (const PendingConnection& pending : pending_) sockets.push_back(pending.wire.interest());
      for (const Call& call : calls_) {
        if (call.wire) sockets.push_back(call.wire->interest());
      }
      poll_briefly(sockets);
      for (Call& call : calls_) advance(call);
      accept_calls();
    }
    return std::move(links_);
  }

 private:
  // A connection attempt to a lower rank.
  struct Call {
    int peer;
    std::vector<SocketAddress> addresses;
    std::size_t current = 0;  // index of the address being tried
    std::optional<Wire> wire{};
    bool introduced_itself = false;  // and the connection is established
    Introduction introduction{};     // used only with a secret
    Deadline deadline = Timeouts::none();
    bool done = false;
    std::string why_not = "no answer";
  };
  struct PendingConnection {
    Wire wire;
    Deadline deadline;
    int introduced = -1;  // the rank that it claims to be, with a secret
  };
  static constexpr std::size_t kMaxFrame = std::max({sizeof(Peers), sizeof(Introduction), sizeof(Proof)});

  std::ptrdiff_t open_calls() const {
    return std::ranges::count_if(calls_, [](const Call& call) { return !call.done; });
  }
  std::ptrdiff_t absent_callers() const {
    return std::count_if(links_.begin() + rank_ + 1, links_.end(), [](const auto& link) { return !link.valid(); });
  }

  void next_address(Call& call, std::string why_not) {
    call.why_not = fmt::format("{}: {}", call.addresses[call.current].text(), why_not);
    call.current = (call.current + 1) % call.addresses.size();
    call.wire.reset();
    call.introduced_itself = false;
    call.deadline = Timeouts::for_next_try();
  }

  void advance(Call& call) {
    if (call.done || call.addresses.empty()) return;
    const auto say = [](int error) { return std::error_code(error, std::generic_category()).message(); };
    if (!call.wire) {
      if (!call.deadline.expired()) return;
      Opened opened = begin_connection(call.addresses[call.current]);
      if (!opened.socket.valid()) return next_address(call, say(opened.error));
      call.wire.emplace(std::move(opened.socket));
      call.deadline = Timeouts::for_address();
      if (secret_.is_given()) {
        call.introduction = introduce(Purpose::kLink, rank_, call.peer, size());
        call.wire->send(WireKind::kIntroduction, bytes_of(call.introduction));
      } else {
        introduce_rank(*call.wire, call.peer);
      }
    }
    if (!call.introduced_itself) {
      pollfd socket{call.wire->socket().get(), POLLOUT, 0};
      if (::poll(&socket, 1, 0) <= 0) {
        if (call.deadline.expired()) next_address(call, "no answer");
        return;
      }
      if (const int error = connection_error(call.wire->socket()); error != 0) return next_address(call, say(error));
      call.introduced_itself = true;
      call.deadline = Timeouts::for_answer();
    }
    const bool open = call.wire->move(kMaxFrame);
    if (const std::optional<WireFrame> frame = call.wire->take()) {
      const bool proven = call.wire->is_authenticated() || !secret_.is_given();
      if (!proven) {
        if (!take_proof(call, *frame)) next_address(call, "it does not know this rank's secret");
        return;
      }
      const auto peers = value_of<Peers>(frame->body);
      if (frame->kind == WireKind::kPeer && peers && peers->world == world_ && peers->from == call.peer &&
          peers->to == rank_) {
        links_[static_cast<std::size_t>(call.peer)] = call.wire->take_socket();
        call.wire.reset();
        call.done = true;
        return;
      }
    }
    if (!open || call.deadline.expired()) next_address(call, open ? "no answer came" : "it is not that rank");
  }

  int size() const { return static_cast<int>(links_.size()); }

  void introduce_rank(Wire& wire, int peer) const {
    const Peers peers{world_, rank_, peer};
    wire.send(WireKind::kPeer, bytes_of(peers));
  }

  // With a secret: returns true if the listener proves that it knows the secret. This rank then introduces itself,
  // which is its own proof.
  bool take_proof(Call& call, const WireFrame& frame) {
    const auto proof = value_of<Proof>(frame.body);
    if (frame.kind != WireKind::kProof || !proof) return false;
    const auto keys = check_proof(secret_, call.introduction, *proof, world_);
    if (!keys) return false;
    call.wire->authenticate(keys->to_listener, keys->to_caller);
    introduce_rank(*call.wire, call.peer);
    call.wire->flush();
    return true;
  }

  void accept_calls() {
    for (int i = 0; i < kAcceptedAtOnce; ++i) {
      Opened opened = accept_connection(listener_);
      const bool no_more_files = opened.error == EMFILE || opened.error == ENFILE;
      const bool one_too_many = opened.socket.valid() ? pending_.size() >= kMaxPendingConnections : no_more_files;
      if (one_too_many && !pending_.empty()) pending_.pop_front();
      if (!opened.socket.valid()) break;
      pending_.push_back({Wire(std::move(opened.socket)), Timeouts::for_answer()});
    }
    for (auto at = pending_.begin(); at != pending_.end();) at = handle(*at) ? pending_.erase(at) : std::next(at);
  }

  // Returns true if a pending connection needs no further handling.
  bool handle(PendingConnection& pending) {
    const bool open = pending.wire.move(kMaxFrame);
    const std::optional<WireFrame> frame = pending.wire.take();
    if (!frame) return !open || pending.deadline.expired();
    if (secret_.is_given() && !pending.wire.is_authenticated()) return !answer(pending, *frame);
    const auto peers = value_of<Peers>(frame->body);
    if (frame->kind != WireKind::kPeer || !peers || peers->world != world_ || peers->to != rank_ ||
        peers->from <= rank_ || peers->from >= size() || (secret_.is_given() && peers->from != pending.introduced)) {
      return true;
    }
    introduce_rank(pending.wire, peers->from);
    pending.wire.flush();
    if (!pending.wire.all_sent()) return true;
    // A rank that connects again has given up its first connection.
    links_[static_cast<std::size_t>(peers->from)] = pending.wire.take_socket();
    return true;
  }

  // With a secret: returns true if a pending connection has introduced itself and this rank has sent its proof.
  bool answer(PendingConnection& pending, const WireFrame& frame) const {
    const auto introduction = value_of<Introduction>(frame.body);
    if (frame.kind != WireKind::kIntroduction || !introduction || introduction->purpose != Purpose::kLink ||
        introduction->listener != rank_ || introduction->size != size()) {
      return false;
    }
    const Answer mine = answer_introduction(secret_, *introduction, world_);
    pending.wire.send(WireKind::kProof, bytes_of(mine.proof));
    pending.wire.flush();
    pending.wire.authenticate(mine.keys.to_caller, mine.keys.to_listener);
    pending.introduced = introduction->caller;
    return pending.wire.all_sent();
  }

  [[noreturn]] void fail_unreachable(const Deadline& deadline) const {
    const auto missing = [&](int peer, const std::string& why) {
      fail_rank(Error(
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
  const WorldNumber world_;
  const Secret secret_;
  const FileDescriptor listener_;
  const RankNames& names_;
  std::vector<FileDescriptor> links_;  // [ranks]
  std::vector<Call> calls_;
  std::list<PendingConnection> pending_;
};

// Parses the text in which a rank tells where it listens: its port, then one numeric address per line.
std::vector<SocketAddress> addresses_in(const std::string& text) {
  std::vector<SocketAddress> addresses;
  std::istringstream lines(text);
  int port = 0;
  lines >> port;
  for (std::string number; addresses.size() < kMaxAddresses && lines >> number;) {
    if (port < 1 || port > 65535) break;
    for (const SocketAddress& address : numeric_address(number, port)) addresses.push_back(address);
  }
  return addresses;
}

[[noreturn]] void fail_garbled(std::size_t rank) {
  fail(ErrorCode::kPeer, fmt::format("rank {} sent too little data", rank), "its text is shorter than a world number",
       "See whether all ranks run the same build.");
}

// The hosts of all ranks, and the number of the world.
struct GatheredHosts {
  Connections connections;
  WorldNumber world{};  // chosen by rank 0
  bool one_host = true;
};

GatheredHosts gather_hosts(Bootstrap& world, const Timeouts& timeouts) {
  GatheredHosts gathered;
  const std::string mine = network_id_of_this_rank();
  const std::string text_of_mine = std::string(bytes_of(random_world())) + mine;
  for (const std::string& text : world.all_gather(text_of_mine, timeouts.for_peer())) {
    const auto theirs = value_of<WorldNumber>(std::string_view(text).substr(0, sizeof(WorldNumber)));
    if (!theirs) fail_garbled(gathered.connections.hosts.size());
    if (gathered.connections.hosts.empty()) gathered.world = *theirs;
    const std::string network_id = text.substr(sizeof(WorldNumber));
    gathered.one_host = gathered.one_host && network_id == mine;
    gathered.connections.hosts.push_back(printable(network_id.substr(0, network_id.find('\n'))));
  }
  return gathered;
}

// Runs `connect` on every rank. A rank that waits for one that can't connect hears of it only when that rank's time
// limit has expired, so it waits longer. A rank that could not connect waits less: the missing peer may not answer here
// either, and the other ranks must hear of the failure before they exit by themselves.
template <typename Connect>
void connect_collectively(Bootstrap& world, const Timeouts& timeouts, const Connect& connect) {
  std::optional<Error> error;
  try {
    connect();
  } catch (...) {
    error = as_error(std::current_exception());
  }
  const bool late = error && error->code() == ErrorCode::kPeer;
  try {
    agree(world, error ? &*error : nullptr,
          late ? Timeouts::grace(kAgreeSeconds) : Timeouts::derived(2.0 * timeouts.seconds()).for_peer());
  } catch (const AgreedError&) {
    throw;
  } catch (const Error&) {
    // Rank 0, which reports the missing rank to the others, has a more specific error itself.
    if (error && world.rank() == 0) throw Error(*error);
    throw;
  }
}

// Ranks with a secret and ranks without one can't prove anything to each other. All ranks check the same data.
void check_secrets(const std::vector<std::string>& texts, const RankNames& names) {
  std::vector<int> without;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].ends_with(kHasSecret)) without.push_back(static_cast<int>(rank));
  }
  if (without.empty() || without.size() == texts.size()) return;
  Error error(ErrorCode::kPeer,
              fmt::format("{} {} no secret", names.list(without), without.size() == 1 ? "has" : "have"),
              fmt::format("the other {} of {} ranks {} one", texts.size() - without.size(), texts.size(),
                          texts.size() - without.size() == 1 ? "has" : "have"),
              "Give all ranks the same RINGATTN_STORE_SECRET, or none of them one.");
  error.set_location({0, names.host(0)});
  throw AgreedError(error);
}

}  // namespace

Connections make_connections(Bootstrap& world, const std::string& address, const Timeouts& timeouts,
                             const std::optional<Secret>& given) {
  const Collective collective(world, timeouts);
  const int rank = world.rank();
  GatheredHosts gathered = gather_hosts(world, timeouts);
  Connections& connections = gathered.connections;
  const bool one_host = gathered.one_host;
  Secret secret;
  // `one_host` has the same value on all ranks.
  FileDescriptor listener;
  std::string own_text;
  collective.run_collectively([&] {
    secret = given ? *given : secret_of_environment();
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
    const SocketAddress end = local_address(listener);
    own_text = fmt::format("{}\n", end.port());
    if (one_host) {
      own_text += end.host();
    } else {
      std::vector<std::string> numbers = interface_addresses();
      if (!address.empty()) numbers.insert(numbers.begin(), address);
      if (numbers.size() > kMaxAddresses) numbers.resize(kMaxAddresses);
      for (const std::string& number : numbers) own_text += number + '\n';
    }
    if (secret.is_given()) own_text.append("\n").append(kHasSecret);
  });
  const std::vector<std::string> all_texts = world.all_gather(own_text, timeouts.for_peer());
  const RankNames names(connections.hosts);
  check_secrets(all_texts, names);
  std::vector<std::vector<SocketAddress>> addresses;
  for (const std::string& theirs : all_texts) addresses.push_back(addresses_in(theirs));
  Connector connector(rank, world.size(), gathered.world, secret, std::move(listener), names);
  connect_collectively(world, timeouts,
                       [&] { connections.links = connector.connect(std::move(addresses), timeouts.for_peer()); });
  return std::move(connections);
}

}  // namespace ringattn
