// SPDX-License-Identifier: Apache-2.0
#include "comm/p2p.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include "base/gpu.hpp"
#include "base/host.hpp"
#include "comm/exchange.hpp"
#include "comm/failure.hpp"
#include "comm/p2p_flags.hpp"
#include "comm/p2p_memory.hpp"

namespace ringattn {

namespace {

constexpr double kSetupSeconds = 60.0;
// How long abandon() waits for pushes that are on their way, in either direction.
constexpr double kAbandonSeconds = 0.5;
// What a released counter jumps by: beyond everything that anyone waits for.
constexpr std::uint32_t kRelease = 1U << 30;

// Who a rank is, for those that share a host with it.
struct RankIdentity {
  std::string host;  // and the boot it runs under
  std::string process;
  std::string gpu;
};

std::vector<RankIdentity> gather_identities(Bootstrap& world, int device, const Deadline& deadline) {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  const std::string mine = fmt::format("{} {}\n{}\n{}\n", host_name(), boot, ::getpid(),
                                       visible_gpus()[static_cast<std::size_t>(device)].uuid);
  std::vector<RankIdentity> all;
  for (const std::string& theirs : world.all_gather(mine, deadline)) {
    const std::size_t first = theirs.find('\n');
    const std::size_t second = theirs.find('\n', first + 1);
    all.push_back({theirs.substr(0, first), theirs.substr(first + 1, second - first - 1), theirs.substr(second + 1)});
  }
  return all;
}

// An exchange between post() and the moment its stream has passed wait().
struct Flight {
  Exchange exchange;
  Ticket ticket = 0;
  CudaEvent posted;
  std::vector<std::uint32_t> send_numbers;     // of exchange.sends, among all of the pair
  std::vector<std::uint32_t> receive_numbers;  // of exchange.receives
  // Where spans go, by peer, in the order of its messages: offered by this rank, and told by the others.
  std::vector<std::vector<P2pAddress>> offered;
  std::vector<std::vector<P2pAddress>> told;
  std::optional<Ticket> mail;            // the host exchange that carries them, until it is done
  std::vector<std::size_t> order;        // of exchange.sends: how they are pushed
  std::size_t next_push = 0;             // in `order`
  std::vector<std::size_t> used_places;  // of told, by peer
  bool pushed = false;                   // all pushes are enqueued
  std::vector<CudaEvent> lanes;          // behind the last push of each lane used
  // From wait() on.
  bool waited = false;
  double patience = 0.0;
  std::optional<Deadline> deadline;  // from when the stream was seen to wait
};

class P2pTransport final : public Transport {
 public:
  P2pTransport(std::unique_ptr<Transport> control, int device, const P2pOptions& options)
      : control_(std::move(control)),
        device_(device),
        options_(options),
        exports_(device),
        imports_(device),
        sent_(static_cast<std::size_t>(control_->size())),
        received_(static_cast<std::size_t>(control_->size())) {
    const Deadline deadline = Deadline::after(kSetupSeconds);
    const std::vector<RankIdentity> ranks = gather_identities(*control_, device, deadline);
    std::vector<std::string> hosts;
    for (const RankIdentity& rank : ranks) {
      hosts.push_back(rank.host.substr(0, rank.host.find(' ')));
      neighbours_.push_back(rank.process == ranks[static_cast<std::size_t>(this->rank())].process);
    }
    names_ = RankNames(hosts);
    check_ranks(ranks);
    for (std::size_t a = 0; a < ranks.size(); ++a) {
      for (std::size_t b = 0; b < a; ++b) host_waits_ = host_waits_ || ranks[a].gpu == ranks[b].gpu;
    }
    flags_.emplace(*control_, device, deadline);
    const DeviceGuard guard(device_);
    for (int lane = 0; lane < std::min(options_.lanes, size() - 1); ++lane) lanes_.emplace_back();
    probe(deadline);
  }

  ~P2pTransport() override {
    if (!flights_.empty() || !passing_.empty()) abandon();
    // Mappings go only when no push uses them.
    const Deadline deadline = Deadline::after(kAbandonSeconds);
    while (!lanes_idle() && !deadline.expired()) std::this_thread::yield();
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  std::string_view name() const override { return "p2p"; }
  MemoryKind memory() const override { return MemoryKind::kDevice; }
  int device() const override { return device_; }
  Route route() const override { return Route::kDirect; }
  Transport& host() override { return *control_; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    return control_->all_gather(bytes, deadline);
  }
  void barrier(const Deadline& deadline) override { control_->barrier(deadline); }

  Ticket post(Exchange exchange, Stream stream) override {
    control_->progress();
    check_exchange(exchange, rank(), size());
    if (broken_) {
      fail(ErrorCode::kInternal, fmt::format("rank {} can't post {}", rank(), exchange_name(exchange, posted_)),
           "it has given up earlier exchanges", "Abort the world after a failure.");
    }
    const DeviceGuard guard(device_);
    refuse_capture(stream);
    Flight flight;
    flight.exchange = std::move(exchange);
    flight.ticket = posted_;
    describe(flight);  // may throw, and nothing has been promised yet

    std::vector<P2pFlags::Operation> ready;
    for (const ReceiveMessage& message : flight.exchange.receives) {
      const std::uint32_t number = ++received_[index(message.peer)];
      flight.receive_numbers.push_back(number);
      ready.push_back({false, P2pFlag::kReady, rank(), message.peer, number});
    }
    for (const SendMessage& message : flight.exchange.sends)
      flight.send_numbers.push_back(++sent_[index(message.peer)]);
    flags_->enqueue(ready, cuda_stream(stream));
    flight.posted.record(cuda_stream(stream));
    flights_.push_back(std::move(flight));
    send_mail(flights_.back());
    push_what_can_be();
    return posted_++;
  }

  void wait(Ticket ticket, Stream stream, const Deadline& deadline) override {
    try {
      check_ticket(ticket, waited_, posted_);
      const DeviceGuard guard(device_);
      Flight& flight = flights_.front();
      const std::vector<P2pFlags::Operation> arrivals = arrivals_of(flight);
      for (push_what_can_be(); !flight.pushed || (host_waits_ && !all_reached(arrivals)); progress()) {
        if (deadline.expired()) {
          fail_late(exchange_name(flight.exchange, ticket), deadline, names_, rank(),
                    flight.mail ? silent_peers(flight) : late_peers(flight));
        }
        std::this_thread::yield();
      }
      enqueue_wait(flight, arrivals, cuda_stream(stream));
      flight.waited = true;
      flight.patience = deadline.seconds();
      passing_.push_back(std::move(flight));
      flights_.pop_front();
      ++waited_;
    } catch (...) {
      abandon();
      throw;
    }
  }

  void progress() override {
    control_->progress();
    const DeviceGuard guard(device_);
    push_what_can_be();
    while (!passing_.empty() && passed(passing_.front())) passing_.pop_front();
    if (passing_.empty()) return;
    Flight& flight = passing_.front();
    if (!P2pFlags::reached(flags_->read(P2pFlag::kReached, rank(), rank()), count_of(flight))) return;
    if (!flight.deadline) flight.deadline = Deadline::after(flight.patience);
    if (!flight.deadline->expired()) return;
    const std::string what = exchange_name(flight.exchange, flight.ticket);
    const std::vector<int> awaited = late_peers(flight);
    const Deadline deadline = *flight.deadline;
    abandon();
    fail_late(what, deadline, names_, rank(), awaited);
  }

  bool finished(Ticket ticket) override {
    if (ticket < waited_) return true;
    const auto at = static_cast<std::size_t>(ticket - waited_);
    if (at >= flights_.size() || !flights_[at].pushed) return false;
    const Flight& flight = flights_[at];
    return late_peers(flight).empty();
  }

  void abandon() noexcept override {
    if (broken_ || (flights_.empty() && passing_.empty())) return;
    broken_ = true;
    try {
      const DeviceGuard guard(device_);
      // Nobody begins to write here who has not been told that he may; who has been gets a moment to end. Then whatever
      // this rank's streams still wait for is given to them: their results mean nothing any more.
      const Deadline arrivals = Deadline::after(kAbandonSeconds);
      while (!arrivals_done() && !arrivals.expired()) std::this_thread::yield();
      const Deadline releases = Deadline::after(kAbandonSeconds);
      do {
        for (int peer = 0; peer < size(); ++peer) {
          flags_->write(P2pFlag::kDone, peer, rank(), received_[index(peer)] + kRelease);
          flags_->write(P2pFlag::kReady, peer, rank(), sent_[index(peer)] + kRelease);
        }
        std::this_thread::yield();  // a peer's late flag may set one back
      } while (!(lanes_idle() && all_passed()) && !releases.expired());
    } catch (const Error&) {
      // The device itself has failed: nothing runs there any more.
    }
    waited_ = posted_;
    control_->abandon();
    flights_.clear();
    passing_.clear();
  }

  std::unique_ptr<Transport> split(int size, const Deadline& deadline) override {
    std::unique_ptr<Transport> part = control_->split(size, deadline);
    if (part == nullptr) return nullptr;
    return make_p2p_transport(std::move(part), device_, options_);
  }

  bool abort(const Error& error) override {
    abandon();
    return control_->abort(error);
  }

 private:
  static std::size_t index(int peer) { return static_cast<std::size_t>(peer); }
  static std::uint32_t count_of(const Flight& flight) { return static_cast<std::uint32_t>(flight.ticket + 1); }

  void check_ranks(const std::vector<RankIdentity>& ranks) const {
    // Everyone sees the same table, so everyone throws the same.
    const auto refuse = [](std::string why) {
      throw AgreedError(ErrorCode::kUnsupported, fmt::format("p2p can't join these ranks ({}). Use --transport nccl, "
                                                             "or one rank a GPU of one host.",
                                                             why));
    };
    for (std::size_t a = 0; a < ranks.size(); ++a) {
      if (ranks[a].host != ranks[0].host) {
        refuse(fmt::format("{} and {} are on different hosts", names_.name(0), names_.name(static_cast<int>(a))));
      }
      for (std::size_t b = 0; b < a; ++b) {
        if (ranks[a].gpu == ranks[b].gpu && ranks[a].process != ranks[b].process) {
          refuse(fmt::format("rank {} and rank {} are processes on one GPU", b, a));
        }
      }
    }
  }

  // Every rank writes to every other's memory once, so that what can't work is refused now.
  void probe(const Deadline& deadline) {
    std::optional<Error> error;
    const auto agreed = [&](const auto& step) {
      try {
        step();
      } catch (const Error& caught) {
        error = caught;
      }
      agree(*control_, error ? &*error : nullptr, deadline);
    };
    Buffer mine;
    std::string text;
    const std::size_t bytes = index(size());
    agreed([&] {
      mine = allocate_device(bytes, device_);
      check_cuda(cudaMemset(mine.data(), 0, bytes), "cudaMemset");
      const P2pAddress place = exports_.describe(mine.data(), bytes);
      text.assign(reinterpret_cast<const char*>(&place), sizeof place);
      text += std::to_string(device_);
    });
    const std::vector<std::string> all = control_->all_gather(text, deadline);
    agreed([&] {
      for (int peer = 0; peer < size(); ++peer) {
        if (peer == rank()) continue;
        P2pAddress place;
        std::memcpy(&place, all[index(peer)].data(), sizeof place);
        if (neighbours_[index(peer)]) enable_access(std::atoi(all[index(peer)].c_str() + sizeof place));
        std::byte* target = imports_.resolve(peer, neighbours_[index(peer)], place) + rank();
        const auto mark = static_cast<std::byte>(1);
        check_cuda(cudaMemcpy(target, &mark, 1, cudaMemcpyDefault), "cudaMemcpy");
      }
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    });
    agreed([&] {
      std::vector<std::byte> marks(bytes);
      check_cuda(cudaMemcpy(marks.data(), mine.data(), bytes, cudaMemcpyDefault), "cudaMemcpy");
      for (int peer = 0; peer < size(); ++peer) {
        if (peer != rank() && marks[index(peer)] != static_cast<std::byte>(1)) {
          fail(ErrorCode::kUnsupported, fmt::format("what rank {} writes to rank {} does not arrive", peer, rank()), {},
               "Use --transport nccl.");
        }
      }
    });
  }

  // Of another device of this process.
  void enable_access(int peer_device) const {
    if (peer_device == device_) return;
    const cudaError_t result = cudaDeviceEnablePeerAccess(peer_device, 0);
    if (result == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
      return;
    }
    check_cuda(result, "cudaDeviceEnablePeerAccess");
  }

  static void refuse_capture(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t result = cudaStreamIsCapturing(cuda_stream(stream), &status);
    if (result == cudaErrorStreamCaptureImplicit) {
      cudaGetLastError();
      status = cudaStreamCaptureStatusActive;
    } else {
      check_cuda(result, "cudaStreamIsCapturing");
    }
    if (status == cudaStreamCaptureStatusNone) return;
    fail(ErrorCode::kUsage, "transfers can't be captured into a graph", "their flags are counted as they are enqueued",
         "Run outside the capture.");
  }

  // Fills what this rank offers, by peer, and makes room for what it will be told.
  void describe(Flight& flight) {
    flight.offered.resize(index(size()));
    flight.told.resize(index(size()));
    for (const ReceiveMessage& message : flight.exchange.receives) {
      for (const ReceiveSpan& span : message.spans) {
        flight.offered[index(message.peer)].push_back(exports_.describe(span.data, span.bytes));
      }
    }
    for (const SendMessage& message : flight.exchange.sends) {
      auto& told = flight.told[index(message.peer)];
      told.resize(told.size() + message.spans.size());
    }
  }

  void send_mail(Flight& flight) {
    Exchange mail;
    mail.label = flight.exchange.label;
    for (int peer = 0; peer < size(); ++peer) {
      auto& offered = flight.offered[index(peer)];
      auto& told = flight.told[index(peer)];
      const auto bytes = [](const auto& list) { return list.size() * sizeof(P2pAddress); };
      if (!offered.empty()) {
        mail.sends.push_back({peer, 0, {{reinterpret_cast<const std::byte*>(offered.data()), bytes(offered)}}});
      }
      if (!told.empty()) {
        mail.receives.push_back({peer, 0, {{reinterpret_cast<std::byte*>(told.data()), bytes(told)}}});
      }
    }
    flight.mail = control_->post(std::move(mail), {});
  }

  // Enqueues the pushes of the exchanges whose addresses are here, in the order of post().
  void push_what_can_be() {
    for (Flight& flight : flights_) {
      if (flight.pushed) continue;
      if (flight.mail) {
        control_->progress();
        if (!control_->finished(*flight.mail)) return;
        control_->wait(*flight.mail, {}, Deadline::after(kSetupSeconds));
        flight.mail.reset();
        order_pushes(flight);
      }
      while (flight.next_push < flight.order.size()) {
        if (!push(flight, flight.order[flight.next_push])) return;
        ++flight.next_push;
      }
      for (std::size_t lane = 0; lane < lanes_.size() && !flight.order.empty(); ++lane) {
        flight.lanes.emplace_back().record(lanes_[lane].get());
      }
      flight.pushed = true;
    }
  }

  // By round, and in it in the order of the ring from this rank on, so that not all ranks push to the same one at once.
  void order_pushes(Flight& flight) const {
    const std::vector<SendMessage>& sends = flight.exchange.sends;
    for (std::size_t i = 0; i < sends.size(); ++i) flight.order.push_back(i);
    std::sort(flight.order.begin(), flight.order.end(), [&](std::size_t a, std::size_t b) {
      return std::pair(sends[a].round, distance(sends[a].peer)) < std::pair(sends[b].round, distance(sends[b].peer));
    });
    flight.used_places.resize(index(size()));
    for (const CudaStream& lane : lanes_) {
      check_cuda(cudaStreamWaitEvent(lane.get(), flight.posted.get()), "cudaStreamWaitEvent");
    }
  }

  int distance(int peer) const { return (peer - rank() + size()) % size(); }

  // Enqueues one push. Where the host does the waiting: whether its time has come.
  bool push(Flight& flight, std::size_t number) {
    const SendMessage& message = flight.exchange.sends[number];
    std::vector<P2pFlags::Operation> before;
    for (std::size_t r = 0; r < flight.exchange.receives.size(); ++r) {
      const ReceiveMessage& receive = flight.exchange.receives[r];
      if (receive.round < message.round) {
        before.push_back({true, P2pFlag::kDone, receive.peer, rank(), flight.receive_numbers[r]});
      }
    }
    before.push_back({true, P2pFlag::kReady, message.peer, rank(), flight.send_numbers[number]});
    if (host_waits_ && !all_reached(before)) return false;
    const cudaStream_t stream = lanes_[index(distance(message.peer) - 1) % lanes_.size()].get();
    if (!host_waits_) flags_->enqueue(before, stream);
    std::size_t& used = flight.used_places[index(message.peer)];
    copy_spans(flight, message, used, stream);
    used += message.spans.size();
    flags_->enqueue({{false, P2pFlag::kDone, rank(), message.peer, flight.send_numbers[number]}}, stream);
    return true;
  }

  bool all_reached(const std::vector<P2pFlags::Operation>& waits) const {
    return std::all_of(waits.begin(), waits.end(), [this](const P2pFlags::Operation& wait) {
      return P2pFlags::reached(flags_->read(wait.flag, wait.from, wait.to), wait.value);
    });
  }

  // Copies the spans of a message to the peer's places from `first` of its list on.
  void copy_spans(const Flight& flight, const SendMessage& message, std::size_t first, cudaStream_t stream) {
    const auto& told = flight.told[index(message.peer)];
    for (std::size_t i = 0; i < message.spans.size(); ++i) {
      const SendSpan& span = message.spans[i];
      if (span.bytes == 0) continue;
      std::byte* target = imports_.resolve(message.peer, neighbours_[index(message.peer)], told[first + i]);
      check_cuda(cudaMemcpyAsync(target, span.data, span.bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    }
  }

  std::vector<P2pFlags::Operation> arrivals_of(const Flight& flight) const {
    std::vector<P2pFlags::Operation> arrivals;
    for (std::size_t i = 0; i < flight.exchange.receives.size(); ++i) {
      arrivals.push_back({true, P2pFlag::kDone, flight.exchange.receives[i].peer, rank(), flight.receive_numbers[i]});
    }
    return arrivals;
  }

  void enqueue_wait(const Flight& flight, const std::vector<P2pFlags::Operation>& arrivals, cudaStream_t stream) {
    flags_->enqueue({{false, P2pFlag::kReached, rank(), rank(), count_of(flight)}}, stream);
    if (!host_waits_) flags_->enqueue(arrivals, stream);
    for (const CudaEvent& lane : flight.lanes) {
      check_cuda(cudaStreamWaitEvent(stream, lane.get()), "cudaStreamWaitEvent");
    }
    flags_->enqueue({{false, P2pFlag::kPassed, rank(), rank(), count_of(flight)}}, stream);
  }

  bool passed(const Flight& flight) const {
    return P2pFlags::reached(flags_->read(P2pFlag::kPassed, rank(), rank()), count_of(flight));
  }
  bool all_passed() const { return passing_.empty() || passed(passing_.back()); }
  bool lanes_idle() const {
    return std::all_of(lanes_.begin(), lanes_.end(),
                       [](const CudaStream& lane) { return cudaStreamQuery(lane.get()) != cudaErrorNotReady; });
  }

  // Whose data, or readiness for this rank's, has not come.
  std::vector<int> late_peers(const Flight& flight) const {
    std::vector<int> peers;
    for (std::size_t i = 0; i < flight.exchange.receives.size(); ++i) {
      const int peer = flight.exchange.receives[i].peer;
      if (!P2pFlags::reached(flags_->read(P2pFlag::kDone, peer, rank()), flight.receive_numbers[i])) {
        peers.push_back(peer);
      }
    }
    for (std::size_t i = 0; i < flight.exchange.sends.size(); ++i) {
      const int peer = flight.exchange.sends[i].peer;
      if (!P2pFlags::reached(flags_->read(P2pFlag::kDone, rank(), peer), flight.send_numbers[i])) peers.push_back(peer);
    }
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    return peers;
  }

  // Who has not said where his spans are.
  std::vector<int> silent_peers(const Flight& flight) const {
    std::vector<int> peers;
    for (int peer = 0; peer < size(); ++peer) {
      if (!flight.told[index(peer)].empty()) peers.push_back(peer);
    }
    return peers;
  }

  // Whether every push that this rank's stream has made room for has ended.
  bool arrivals_done() const {
    for (int peer = 0; peer < size(); ++peer) {
      const std::uint32_t ready = flags_->read(P2pFlag::kReady, rank(), peer);
      if (!P2pFlags::reached(flags_->read(P2pFlag::kDone, peer, rank()), ready)) return false;
    }
    return true;
  }

  std::unique_ptr<Transport> control_;
  int device_;
  P2pOptions options_;
  RankNames names_;
  std::vector<bool> neighbours_;  // [ranks] threads of this process
  bool host_waits_ = false;       // ranks share a GPU: nothing on it waits for another rank
  std::optional<P2pFlags> flags_;
  P2pExports exports_;
  P2pImports imports_;
  std::vector<CudaStream> lanes_;
  std::vector<std::uint32_t> sent_;      // [ranks] messages posted for each peer
  std::vector<std::uint32_t> received_;  // [ranks] and from each
  std::deque<Flight> flights_;           // posted and not yet waited for, in order
  std::deque<Flight> passing_;           // waited for, the stream perhaps not there yet
  Ticket posted_ = 0;
  Ticket waited_ = 0;
  bool broken_ = false;
};

}  // namespace

std::unique_ptr<Transport> make_p2p_transport(std::unique_ptr<Transport> control, int device,
                                              const P2pOptions& options) {
  return std::make_unique<P2pTransport>(std::move(control), device, options);
}

}  // namespace ringattn
