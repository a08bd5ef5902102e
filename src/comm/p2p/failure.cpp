// SPDX-License-Identifier: Apache-2.0
// How transport `p2p` ends when ranks don't come, fail or disagree: deadlines of the device, which peers to blame,
// giving up, and the destructor. Nothing here waits for a peer without a time limit, and no stream of this rank is left
// waiting.
#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/exchange.hpp"
#include "comm/p2p/p2p_transport.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

// How long running pushes may take to end, and peers to close the allocations they have opened.
constexpr double kGraceSeconds = 0.2;
// How long this rank's own work, which waits for no peer any more, may take to end.
constexpr double kDrainSeconds = 5.0;
// How long to wait for the error of a peer that gave up.
constexpr double kReasonSeconds = 1.0;

// Polls until `done()`. Returns false if that took longer than `seconds`.
template <typename Done>
bool poll(double seconds, const Done& done) {
  const Deadline deadline = Timeouts::grace(seconds);
  while (!done()) {
    if (deadline.expired()) return false;
    std::this_thread::yield();
  }
  return true;
}

std::vector<int> sorted_unique(std::vector<int> peers) {
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

}  // namespace

void P2pTransport::check_alive() {
  control_->progress();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || from(peer).forced.now() == 0) continue;
    poll(kReasonSeconds, [&] {
      control_->progress();
      return false;
    });
    fail(ErrorCode::kPeer, fmt::format("{} gave up", names_.name(peer)),
         fmt::format("it did not wait for {} to be ready for its data", names_.name(rank_)), "See its own message.");
  }
}

// The peers that the host waits for before it can enqueue the device's wait.
std::vector<int> P2pTransport::awaited_by_host(const Flight& flight) {
  std::vector<int> peers;
  for (std::size_t i = 0; i < flight.receive_numbers.size(); ++i) {
    const int peer = flight.exchange.receives[i].peer;
    if (!from(peer).pushed.reached(flight.receive_numbers[i])) peers.push_back(peer);
  }
  for (std::size_t i = 0; i < flight.send_numbers.size(); ++i) {
    const SendMessage& message = flight.exchange.sends[i];
    // A send that waits for this rank's own receives is not its peer's fault.
    if (flight.pushes[i] == Push::kWaiting && may_send(flight, message.round, &PairCounters::pushed)) {
      peers.push_back(message.peer);
    }
  }
  return sorted_unique(std::move(peers));
}

std::vector<int> P2pTransport::awaited_by_device(const Flight& flight) const {
  std::vector<int> peers;
  for (std::size_t i = 0; i < flight.receive_numbers.size(); ++i) {
    if (!received(flight, i)) peers.push_back(flight.exchange.receives[i].peer);
  }
  for (std::size_t i = 0; i < flight.send_numbers.size(); ++i) {
    const SendMessage& message = flight.exchange.sends[i];
    if (!sent(flight, i) && may_send(flight, message.round, &PairCounters::done)) peers.push_back(message.peer);
  }
  return sorted_unique(std::move(peers));
}

void P2pTransport::drop_passed() {
  const Counter& passed = segment_->rank(rank_).passed;
  while (!on_device_.empty() && passed.reached(static_cast<std::uint32_t>(on_device_.front().ticket + 1))) {
    on_device_.pop_front();
  }
}

// Checks the deadline of the exchange that the device waits for now.
void P2pTransport::check_on_device() {
  if (on_device_.empty()) return;
  Flight& flight = on_device_.front();
  if (!segment_->rank(rank_).reached.reached(static_cast<std::uint32_t>(flight.ticket + 1))) return;
  if (!flight.limit) flight.limit = Timeouts::derived(flight.seconds).for_peer();
  if (!wait_expired(*flight.limit)) return;
  fail_late(exchange_name(flight.exchange, flight.ticket), *flight.limit, names_, rank_, awaited_by_device(flight));
}

bool P2pTransport::lanes_idle() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const CudaStream& lane) {
    const cudaError_t result = cudaStreamQuery(lane.get());
    if (result != cudaSuccess) cudaGetLastError();
    return result != cudaErrorNotReady;  // a broken device runs nothing either
  });
}

void P2pTransport::abandon() noexcept {
  try {
    drop_passed();
    if (!flights_.empty() || !on_device_.empty()) give_up();
  } catch (...) {
    unsafe_ = true;  // the driver refuses all calls, so work may still be running
  }
}

void P2pTransport::give_up() {
  broken_ = true;
  const DeviceGuard guard(device_);
  segment_->rank(rank_).given_up.value.store(1, std::memory_order_seq_cst);

  // Enqueued pushes to this rank can't be taken back, so let them run even if this rank is not ready: they overwrite
  // only memory of exchanges that are given up. Pushes by this rank end by themselves while their receivers live.
  const auto peers_are_done = [&] {
    bool done = true;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      PairCounters& pair = from(peer);
      const std::uint32_t pushing = pair.pushing.value.load(std::memory_order_seq_cst);
      if (!pair.ready.reached(pushing)) pair.ready.value.store(pushing, std::memory_order_release);
      done = done && pair.done.reached(pushing);
    }
    return done;
  };
  const bool all_done = poll(kGraceSeconds, [&] { return peers_are_done() && lanes_idle(); });
  if (!all_done && !peers_are_done()) unsafe_ = true;

  // Release this rank's streams from waits for events that will not come, or too late.
  for (const std::deque<Flight>* flights : {&on_device_, &flights_}) {
    for (const Flight& flight : *flights) {
      for (std::size_t i = 0; i < flight.receive_numbers.size(); ++i) {
        Counter& done = from(flight.exchange.receives[i].peer).done;
        if (!done.reached(flight.receive_numbers[i])) {
          done.value.store(flight.receive_numbers[i], std::memory_order_release);
        }
      }
      for (std::size_t i = 0; i < flight.send_numbers.size(); ++i) {
        PairCounters& pair = to(flight.exchange.sends[i].peer);
        const std::uint32_t number = flight.send_numbers[i];
        if (flight.pushes[i] != Push::kEnqueued || pair.done.reached(number) || pair.ready.reached(number)) continue;
        pair.forced.value.store(1, std::memory_order_seq_cst);
        pair.ready.value.store(number, std::memory_order_release);
      }
    }
  }
  waited_ = next_ticket();
  flights_.clear();
  on_device_.clear();
}

bool P2pTransport::abort(const Error& error) {
  const bool prints = control_->abort(error);  // first, because peers wait
  abandon();
  return prints;
}

P2pTransport::~P2pTransport() {
  drop_passed();
  // If nothing was given up, exchanges that a stream has not finished yet get a short time to complete.
  if (!broken_ && flights_.empty()) {
    poll(kGraceSeconds, [&] {
      drop_passed();
      return on_device_.empty();
    });
  }
  abandon();
  const auto idle = [&] {
    if (!lanes_idle()) return false;
    const cudaError_t result = last_stream_ ? cudaEventQuery(last_->get()) : cudaSuccess;
    if (result != cudaSuccess) cudaGetLastError();
    return result != cudaErrorNotReady;
  };
  const bool drained = poll(kDrainSeconds, idle);
  if (!drained) {
    segment_->leak();
    static_cast<void>(new auto(std::move(lanes_)));
  }
  // The world that this one was split from, or one split from it, still uses the memory.
  if (memory_.use_count() > 1) return;
  if (!drained || unsafe_) {
    memory_->leak();
    return;
  }
  memory_->close_all();
  segment_->rank(rank_).gone.value.store(1, std::memory_order_release);
  // Memory is freed after the peers have closed it, if they do so in time.
  if (!memory_->exports_to_processes()) return;
  poll(kGraceSeconds, [&] {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && segment_->rank(peer).gone.now() == 0) return false;
    }
    return true;
  });
}

}  // namespace ringattn
