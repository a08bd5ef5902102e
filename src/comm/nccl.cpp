// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "base/cuda.hpp"
#include "comm/device_peers.hpp"
#include "comm/exchange.hpp"
#include "comm/nccl_calls.hpp"
#include "comm/nccl_communicator.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

// How long work that waits for no peer any more may take to end.
constexpr double kDrainSeconds = 5.0;

// An exchange from post() until the device has finished its wait.
struct Flight {
  Exchange exchange;
  Ticket ticket = 0;
  std::vector<int> rounds;             // distinct, ascending
  std::size_t submitted = 0;           // rounds submitted to NCCL
  std::vector<int> peers;              // distinct, ascending
  std::vector<std::uint64_t> mine;     // [peers] hashes of this rank's spans shared with each peer
  std::vector<std::uint64_t> theirs;   // [peers] the peers' hashes of the same spans; 0: not posted yet
  std::optional<Ticket> handshake;     // control exchange of these hashes, until it is done
  CudaEvent posted;                    // recorded on the caller's stream: the spans may be used
  CudaEvent moved;                     // recorded after the last round
  bool enqueued = false;               // `moved` is recorded
  std::optional<CudaEvent> reached{};  // recorded where the caller's stream waits
  double seconds = 0.0;                // seconds that it may wait there
  std::optional<Deadline> limit{};     // deadline of that wait, once the stream has reached it
};

// A nonzero hash of the rounds and sizes of the spans that go to `peer`, or come from it. NCCL itself doesn't detect
// that the two sides differ.
template <typename Message>
std::uint32_t hash_spans(const std::vector<Message>& messages, int peer) {
  std::uint64_t hash = 0xCBF29CE484222325U;  // FNV-1a
  const auto mix = [&hash](std::uint64_t number) { hash = (hash ^ number) * 0x100000001B3U; };
  for (const Message& message : messages) {
    if (message.peer != peer) continue;
    for (const auto& span : message.spans) {
      if (span.bytes == 0) continue;
      mix(static_cast<std::uint64_t>(message.round));
      mix(span.bytes);
    }
  }
  return static_cast<std::uint32_t>(hash >> 32) | 1U;
}

// Packs the hashes of both directions into one number.
std::uint64_t pack_hashes(std::uint32_t sent, std::uint32_t received) { return std::uint64_t{sent} << 32 | received; }

class NcclTransport final : public Transport {
 public:
  NcclTransport(std::unique_ptr<Transport> control, std::unique_ptr<NcclCommunicator> communicator, int device,
                RankNames names, const NcclOptions& options)
      : control_(std::move(control)),
        communicator_(std::move(communicator)),
        device_(device),
        names_(std::move(names)),
        options_(options),
        rank_(control_->rank()),
        size_(control_->size()) {
    const DeviceGuard guard(device_);
    stream_.emplace();
  }

  ~NcclTransport() override {
    if (world_has_failed()) {
      give_up();
    } else if (flights_.empty()) {
      drain([this] { return on_device_.empty(); });
    }
    abandon();
    if (!drain([this] { return cudaStreamQuery(stream_->get()) != cudaErrorNotReady; })) {
      static_cast<void>(new auto(std::move(*stream_)));
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view name() const override { return "nccl"; }
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
    check_exchange(exchange, rank_, size_);
    const Ticket ticket = next_ticket();
    if (broken_) {
      fail(ErrorCode::kInternal, fmt::format("rank {} can't post {}", rank_, exchange_name(exchange, ticket)),
           "it has given up earlier exchanges", "Abort the world after a failure.");
    }
    const DeviceGuard guard(device_);
    Flight flight{std::move(exchange), ticket, {}, 0, {}, {}, {}, {}, CudaEvent(), CudaEvent()};
    const auto collect = [&](const auto& messages) {
      for (const auto& message : messages) {
        flight.rounds.push_back(message.round);
        flight.peers.push_back(message.peer);
      }
    };
    collect(flight.exchange.sends);
    collect(flight.exchange.receives);
    for (std::vector<int>* numbers : {&flight.rounds, &flight.peers}) {
      std::sort(numbers->begin(), numbers->end());
      numbers->erase(std::unique(numbers->begin(), numbers->end()), numbers->end());
    }
    flight.posted.record(cuda_stream(stream));
    flight.mine.resize(flight.peers.size());
    flight.theirs.resize(flight.peers.size());
    Exchange handshake{flight.exchange.label, {}, {}};
    for (std::size_t i = 0; i < flight.peers.size(); ++i) {
      const int peer = flight.peers[i];
      flight.mine[i] = pack_hashes(hash_spans(flight.exchange.sends, peer), hash_spans(flight.exchange.receives, peer));
      handshake.sends.push_back(
          {peer, 0, {{reinterpret_cast<const std::byte*>(&flight.mine[i]), sizeof(std::uint64_t)}}});
      handshake.receives.push_back(
          {peer, 0, {{reinterpret_cast<std::byte*>(&flight.theirs[i]), sizeof(std::uint64_t)}}});
    }
    flight.handshake = control_->post(std::move(handshake), Stream{});
    flights_.push_back(std::move(flight));
    pump();
    return ticket;
  }

  void wait(Ticket ticket, Stream stream, const Deadline& deadline) override {
    try {
      control_->progress();
      check_ticket(ticket, waited_, next_ticket());
      const DeviceGuard guard(device_);
      Flight& flight = flights_.front();
      pump();
      for (; !flight.enqueued; progress()) {
        if (wait_expired(deadline)) {
          fail_late(exchange_name(flight.exchange, ticket), deadline, names_, rank_, awaited(flight));
        }
        std::this_thread::yield();
      }
      flight.seconds = flight.moved.passed() ? std::numeric_limits<double>::infinity() : deadline.seconds();
      flight.reached.emplace();
      flight.reached->record(cuda_stream(stream));
      check_cuda(cudaStreamWaitEvent(cuda_stream(stream), flight.moved.get(), 0), "cudaStreamWaitEvent");
      on_device_.push_back(std::move(flight));
      flights_.pop_front();
      ++waited_;
      drop_passed();
    } catch (...) {
      abandon();
      throw;
    }
  }

  void progress() override {
    control_->progress();
    if (broken_) return;
    const DeviceGuard guard(device_);
    pump();
    if (!on_device_.empty()) communicator_->ready();  // throws what failed meanwhile
    drop_passed();
    check_on_device();
  }

  bool finished(Ticket ticket) override {
    const auto index = static_cast<std::size_t>(ticket - waited_);
    return ticket >= waited_ && index < flights_.size() && flights_[index].enqueued && flights_[index].moved.passed();
  }

  void abandon() noexcept override {
    try {
      drop_passed();
    } catch (...) {
      // The device is broken. The communicator is aborted in any case.
    }
    if (!flights_.empty() || !on_device_.empty()) give_up();
  }

  std::unique_ptr<Transport> split_world(int size, const Deadline& deadline) override {
    control_->progress();
    check_split(size, size_);
    std::unique_ptr<Transport> control = control_->split_world(size, deadline);
    if (control == nullptr) return nullptr;
    try {
      auto communicator = std::make_unique<NcclCommunicator>(*control, device_, options_, deadline);
      return std::make_unique<NcclTransport>(std::move(control), std::move(communicator), device_, names_, options_);
    } catch (const AgreedError& error) {
      throw Error(error);  // agreed among these ranks only
    }
  }

  bool abort(const Error& error) override {
    const bool prints = control_->abort(error);  // first, because peers wait
    give_up();
    return prints;
  }

 private:
  Ticket next_ticket() const { return waited_ + static_cast<Ticket>(flights_.size()); }

  void give_up() noexcept {
    if (std::exchange(broken_, true)) return;
    control_->abandon();
    // NCCL's kernels end without their peers. After that nothing writes to the spans, and waiting streams continue.
    communicator_->abort();
    drain([this] { return cudaStreamQuery(stream_->get()) != cudaErrorNotReady; });
    waited_ = next_ticket();
    flights_.clear();
    on_device_.clear();
  }

  // Returns true if this rank or another one has failed. Ranks finalize NCCL together, so a failed rank must not wait
  // for that: it could not report its failure meanwhile.
  bool world_has_failed() const noexcept {
    if (broken_ || std::uncaught_exceptions() > exceptions_) return true;
    try {
      control_->progress();
    } catch (...) {
      return true;
    }
    return false;
  }

  // Submits to NCCL whatever can be enqueued now, strictly in the order of post(), so that all ranks have the same
  // order.
  void pump() {
    for (Flight& flight : flights_) {
      if (flight.enqueued) continue;
      if (flight.handshake) {
        if (!control_->finished(*flight.handshake)) return;
        control_->wait(*flight.handshake, Stream{}, Timeouts::none());  // finished: returns at once
        flight.handshake.reset();
        check_sides(flight);
        check_cuda(cudaStreamWaitEvent(stream_->get(), flight.posted.get(), 0), "cudaStreamWaitEvent");
      }
      for (; flight.submitted < flight.rounds.size(); ++flight.submitted) {
        if (!communicator_->ready()) return;
        submit(flight, flight.rounds[flight.submitted]);
      }
      if (!communicator_->ready()) return;
      flight.moved.record(stream_->get());
      flight.enqueued = true;
    }
  }

  // Throws if a peer receives other spans than this rank sends, or the reverse.
  void check_sides(const Flight& flight) const {
    for (std::size_t i = 0; i < flight.peers.size(); ++i) {
      const auto sent = static_cast<std::uint32_t>(flight.mine[i] >> 32);
      const auto received = static_cast<std::uint32_t>(flight.mine[i]);
      if (flight.theirs[i] == pack_hashes(received, sent)) continue;
      fail(ErrorCode::kInternal,
           fmt::format("the two sides of {} don't fit", exchange_name(flight.exchange, flight.ticket)),
           fmt::format("{} and {} describe different spans", names_.name(rank_), names_.name(flight.peers[i])),
           kMisfitSuggestion);
    }
  }

  void submit(const Flight& flight, int round) {
    const ncclComm_t communicator = communicator_->get();
    communicator_->check(nccl().group_start(), "ncclGroupStart");
    for (const ReceiveMessage& message : flight.exchange.receives) {
      for (const ReceiveSpan& span : message.spans) {
        if (message.round != round || span.bytes == 0) continue;
        communicator_->check(nccl().recv(span.data, span.bytes, ncclInt8, message.peer, communicator, stream_->get()),
                             "ncclRecv");
      }
    }
    for (const SendMessage& message : flight.exchange.sends) {
      for (const SendSpan& span : message.spans) {
        if (message.round != round || span.bytes == 0) continue;
        communicator_->check(nccl().send(span.data, span.bytes, ncclInt8, message.peer, communicator, stream_->get()),
                             "ncclSend");
      }
    }
    communicator_->check(nccl().group_end(), "ncclGroupEnd");
  }

  // Returns true if `peer` has posted this exchange too. A thread of the control transport writes the value.
  static bool has_come(Flight& flight, int peer) {
    const auto at = std::lower_bound(flight.peers.begin(), flight.peers.end(), peer) - flight.peers.begin();
    return std::atomic_ref<std::uint64_t>(flight.theirs[static_cast<std::size_t>(at)]).load() != 0;
  }

  static std::vector<int> awaited(Flight& flight) {
    std::vector<int> missing;
    int held = std::numeric_limits<int>::max();  // sends of later rounds wait for this rank's own receives
    for (const ReceiveMessage& message : flight.exchange.receives) {
      if (has_come(flight, message.peer)) continue;
      missing.push_back(message.peer);
      held = std::min(held, message.round);
    }
    for (const SendMessage& message : flight.exchange.sends) {
      if (message.round <= held && !has_come(flight, message.peer)) missing.push_back(message.peer);
    }
    if (missing.empty()) missing = flight.peers;  // all have posted, but NCCL makes no progress
    std::sort(missing.begin(), missing.end());
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    return missing;
  }

  void drop_passed() {
    while (!on_device_.empty() && on_device_.front().moved.passed()) on_device_.pop_front();
  }

  void check_on_device() {
    if (on_device_.empty()) return;
    Flight& flight = on_device_.front();
    if (!flight.reached->passed()) return;
    if (!flight.limit) flight.limit = Timeouts::derived(flight.seconds).for_peer();
    if (!wait_expired(*flight.limit)) return;
    fail_late(exchange_name(flight.exchange, flight.ticket), *flight.limit, names_, rank_, flight.peers);
  }

  // Polls until `done()`. Returns false if that took more than kDrainSeconds.
  template <typename Done>
  bool drain(const Done& done) noexcept {
    const Deadline deadline = Timeouts::grace(kDrainSeconds);
    try {
      for (; !done(); drop_passed()) {
        if (deadline.expired()) return false;
        std::this_thread::yield();
      }
    } catch (...) {
      return false;
    }
    return true;
  }

  const std::unique_ptr<Transport> control_;
  const std::unique_ptr<NcclCommunicator> communicator_;
  const int device_;
  const RankNames names_;
  const NcclOptions options_;
  const int rank_;
  const int size_;
  std::optional<CudaStream> stream_;                   // for NCCL's kernels
  std::deque<Flight> flights_;                         // posted and not yet waited for, in order
  std::deque<Flight> on_device_;                       // waited for; the device may not have finished them yet
  Ticket waited_ = 0;                                  // number of the first of flights_
  bool broken_ = false;                                // gave up its exchanges and the communicator
  const int exceptions_ = std::uncaught_exceptions();  // when this object was created
};

// Every rank checks the same data, so all ranks throw the same error.
void check_peers(const std::vector<DevicePeer>& peers) {
  const auto refuse = [](const std::string& why) {
    throw AgreedError(Error(ErrorCode::kUnsupported, "nccl can't join these ranks", why,
                            {"Start one rank a GPU, or use ", setting("transport", "p2p"), "."}));
  };
  for (std::size_t i = 0; i < peers.size(); ++i) {
    if (peers[i].gpu.empty()) refuse(fmt::format("rank {} has no GPU", i));
    for (std::size_t j = 0; j < i; ++j) {
      if (peers[i].gpu == peers[j].gpu) refuse(fmt::format("ranks {} and {} share {}", j, i, peers[i].gpu));
    }
  }
}

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> control, int device,
                                               const NcclOptions& options) {
  const Deadline deadline = Timeouts(options.setup_seconds).for_peer();
  const std::vector<DevicePeer> peers = gather_device_peers(*control, device, deadline);
  check_peers(peers);
  try {
    auto communicator = std::make_unique<NcclCommunicator>(*control, device, options, deadline);
    return std::make_unique<NcclTransport>(std::move(control), std::move(communicator), device,
                                           name_device_peers(peers), options);
  } catch (const AgreedError& error) {
    throw AgreedError(
        Error(ErrorCode::kUnsupported, "nccl can't join these ranks", error.message(), "Use another transport."));
  }
}

}  // namespace ringattn
