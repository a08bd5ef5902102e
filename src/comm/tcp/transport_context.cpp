// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/transport_context.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "comm/heartbeat_monitor.hpp"

namespace ringattn {

namespace {

// Much longer than a notice takes, so ranks that fail at nearly the same time hear of each other.
constexpr double kReportSeconds = 0.3;
// How long the last frames may take to be sent, and then how long to wait for peers to leave.
constexpr double kLeaveSeconds = 1.0;
constexpr double kPeerLeaveSeconds = 0.2;

bool is_heartbeat(std::uint32_t value) {
  constexpr Heartbeat kHeartbeats[] = {Heartbeat::kWaiting, Heartbeat::kWorking, Heartbeat::kLeaving};
  return std::ranges::any_of(kHeartbeats, [&](Heartbeat heartbeat) {
    return value == static_cast<std::uint32_t>(static_cast<unsigned char>(heartbeat));
  });
}

}  // namespace

TcpTransportContext::TcpTransportContext(int rank, Connections connections)
    : rank_(rank),
      names_(connections.hosts),
      early_ready_(connections.links.size()),
      left_(connections.links.size()),
      heartbeats_(connections.links.size()),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_.valid()) {
    fail(ErrorCode::kUnsupported, "can't serve the connections", std::generic_category().message(errno),
         "See this user's limit on open files (ulimit -n).");
  }
  for (std::size_t peer = 0; peer < connections.links.size(); ++peer) {
    links_.emplace_back(static_cast<int>(peer), std::move(connections.links[peer]), *this);
  }
  thread_ = std::thread([this] { serve(); });
}

TcpTransportContext::~TcpTransportContext() {
  {
    std::unique_lock lock(mutex);
    for (TcpLink& link : links_) {
      if (!link.is_open()) continue;
      link.send({.kind = FrameKind::kLeave});
      flush(link);
    }
    const auto wait_for = [&](double seconds, const auto& done) {
      changed_.wait_for(lock, std::chrono::duration<double>(seconds), done);
    };
    wait_for(kLeaveSeconds, [&] {
      return std::ranges::none_of(links_, [](const TcpLink& link) { return link.is_open() && link.wants_to_send(); });
    });
    // close() with unread data resets the connection and would discard data in flight, so shut down first.
    for (TcpLink& link : links_) link.shut_down();
    wait_for(kPeerLeaveSeconds,
             [&] { return std::ranges::none_of(links_, [](const TcpLink& link) { return link.is_open(); }); });
    ending_ = true;
  }
  wake();
  thread_.join();
}

void TcpTransportContext::wake() {
  const std::uint64_t one = 1;
  static_cast<void>(uninterrupted([&] { return ::write(wake_.get(), &one, sizeof one); }));
}

// Runs on the links' thread.
void TcpTransportContext::serve() {
  std::vector<pollfd> sockets;
  for (std::unique_lock lock(mutex); !ending_;) {
    sockets.assign({{wake_.get(), POLLIN, 0}});
    for (const TcpLink& link : links_) {
      const short events = link.is_open() && link.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
      sockets.push_back({link.is_open() ? link.fd() : -1, events, 0});
    }
    lock.unlock();
    static_cast<void>(::poll(sockets.data(), sockets.size(), -1));
    lock.lock();
    std::uint64_t calls = 0;
    if (sockets[0].revents != 0) {
      [[maybe_unused]] const auto read = ::read(wake_.get(), &calls, sizeof calls);
    }
    receive_all(sockets);
    for (TcpLink& link : links_) {
      if (link.is_open() && link.wants_to_send()) moved_ += link.flush();
    }
    changed_.notify_all();
  }
}

void TcpTransportContext::receive_all(const std::vector<pollfd>& sockets) {
  std::vector<TcpLink*> ended;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (sockets[i + 1].revents == 0) continue;
    std::size_t bytes = 0;
    if (links_[i].is_open() && !links_[i].receive(bytes)) ended.push_back(&links_[i]);
    moved_ += bytes;
  }
  // Only after all links have been read: another rank may have sent the reason why this one ended.
  for (TcpLink* link : ended) end_link(*link);
}

void TcpTransportContext::end_link(TcpLink& link) {
  link.close();
  if (left_[static_cast<std::size_t>(link.peer())] || over_ || ending_) return;
  given_up_ = Error(ErrorCode::kPeer, fmt::format("{} is gone", names_.name(link.peer())), link.why_ended(),
                    "See whether it was killed, and its own message.");
  over_ = true;
}

void TcpTransportContext::flush(TcpLink& link) {
  moved_ += link.flush();
  if (link.wants_to_send() && std::this_thread::get_id() != thread_.get_id()) wake();
}

std::shared_ptr<TcpWorldState> TcpTransportContext::open_world(std::uint64_t world) {
  std::shared_ptr<TcpWorldState>& state = worlds_[world];
  if (state == nullptr) {
    state = std::make_shared<TcpWorldState>();
  } else if (!state->is_open) {
    --early_worlds_;
  }
  state->is_open = true;
  return state;
}

TcpWorldState& TcpTransportContext::find_world(std::uint64_t world) {
  std::shared_ptr<TcpWorldState>& state = worlds_[world];
  if (state == nullptr) {
    state = std::make_shared<TcpWorldState>();
    ++early_worlds_;
  }
  return *state;
}

void TcpTransportContext::close_world(std::uint64_t world) {
  const auto state = worlds_.find(world);
  if (state == worlds_.end()) return;
  for (const auto& [address, ready] : state->second->ready) drop_ready(address);
  worlds_.erase(state);
  ended_worlds_.insert(world);
}

bool TcpTransportContext::is_new_world(std::uint64_t world) {
  const std::lock_guard lock(mutex);
  const auto known = worlds_.find(world);
  return (known == worlds_.end() || !known->second->is_open) && !ended_worlds_.contains(world);
}

void TcpTransportContext::drop_ready(const TcpWorldState::Address& address) {
  --early_ready_[static_cast<std::size_t>(std::get<1>(address))];
}

void TcpTransportContext::send(int peer, const FrameHead& head, std::string_view body) {
  TcpLink& link = links_[static_cast<std::size_t>(peer)];
  link.send(head, body);
  flush(link);
}

void TcpTransportContext::take_ready(TcpWorldState& world, TcpFlight& flight, int peer, int round,
                                     const TcpWorldState::Ready& ready) {
  const std::size_t send = find_message(flight.exchange.sends, peer, round);
  if (send == flight.sends.size() || ready.total != flight.sends[send].left ||
      ready.shape != span_shape(flight.exchange.sends[send])) {
    flight.misfit = peer;
    world.misfit = true;
  } else {
    flight.sends[send].ready = true;
  }
}

void TcpTransportContext::start_sends(const std::shared_ptr<TcpFlight>& flight) {
  for (std::size_t i = 0; i < flight->sends.size(); ++i) {
    const SendMessage& message = flight->exchange.sends[i];
    TcpFlight::Send& send = flight->sends[i];
    if (!flight->gate.may_send(message.round)) break;
    if (send.started || !send.ready) continue;
    send.started = true;
    TcpLink& link = links_[static_cast<std::size_t>(message.peer)];
    link.send_data(flight, i);
    flush(link);
  }
}

bool TcpTransportContext::accepts_frame(int peer, const FrameHead& head) const {
  if (head.kind == FrameKind::kNotice) return head.round >= 0 && head.round < size();
  if (head.kind != FrameKind::kGather && head.kind != FrameKind::kReady) return true;
  if (ended_worlds_.contains(head.world)) return true;
  const auto world = worlds_.find(head.world);
  const bool is_open = world != worlds_.end() && world->second->is_open;
  if (world == worlds_.end() && early_worlds_ >= kMaxEarlyWorlds) return false;
  if (head.kind == FrameKind::kReady) {
    return early_ready_[static_cast<std::size_t>(peer)] < kMaxEarlyReady;
  }
  // No rank finishes a collective before this rank has joined it, so at most one more can have begun.
  const std::int64_t begun = is_open ? world->second->begun : 0;
  return head.number >= 0 && head.number <= begun && (is_open || head.bytes <= kMaxEarlyGathered);
}

bool TcpTransportContext::find_destination(int peer, const FrameHead& head, Destination& destination) {
  destination = {};
  const auto world = worlds_.find(head.world);
  if (world == worlds_.end()) return ended_worlds_.contains(head.world);  // the ended world has given the exchange up
  const TcpWorldState& state = *world->second;
  if (head.number < 0) return false;
  if (head.number < state.waited) return true;  // given up
  const auto index = static_cast<std::size_t>(head.number - state.waited);
  if (index >= state.flights.size()) return false;
  const std::shared_ptr<TcpFlight>& flight = state.flights[index];
  const std::size_t receive = find_message(flight->exchange.receives, peer, head.round);
  if (receive == flight->receives.size() || flight->receives[receive].done) return false;
  const std::size_t left = flight->receives[receive].left;
  if (head.bytes > left || (head.bytes == 0 && left > 0)) return false;
  destination = {flight, receive};
  return true;
}

void TcpTransportContext::data_received(const Destination& destination) {
  TcpFlight& flight = *destination.flight;
  TcpFlight::Receive& receive = flight.receives[destination.receive];
  if (flight.withdrawn || receive.left > 0) return;
  receive.done = true;
  --flight.open;
  flight.gate.receive_done(flight.exchange.receives[destination.receive].round);
  start_sends(destination.flight);
}

void TcpTransportContext::data_sent(const std::shared_ptr<TcpFlight>& flight, std::size_t send) {
  flight->sends[send].done = true;
  --flight->open;
  changed_.notify_all();
}

bool TcpTransportContext::frame_received(int peer, const FrameHead& head, std::string body) {
  switch (head.kind) {
    case FrameKind::kHeartbeat: {
      moved_ -= sizeof(FrameHead);  // transferred bytes are work, except those of heartbeats
      std::string& heartbeats = heartbeats_[static_cast<std::size_t>(peer)];
      const auto heartbeat = static_cast<char>(head.shape);
      if (!is_heartbeat(head.shape)) return false;
      if (heartbeats.find(heartbeat) == std::string::npos) heartbeats += heartbeat;
      return true;
    }
    case FrameKind::kLeave:
      left_[static_cast<std::size_t>(peer)] = true;
      return true;
    case FrameKind::kNotice: {
      if (!is_packed_error(body)) return false;
      const auto [report, first] = reports_.emplace(head.round, unpack_error(body));
      over_ = true;
      if (first && failure_callback_) failure_callback_(aborted_error(names_, head.round, report->second));
      return true;
    }
    default:
      break;
  }
  if (ended_worlds_.contains(head.world)) return true;
  TcpWorldState& world = find_world(head.world);
  if (head.kind == FrameKind::kGather) return gather_received(world, peer, head, std::move(body));
  // Only kReady remains.
  const TcpWorldState::Ready ready{head.total, head.shape};
  if (head.number < world.waited) return true;  // given up
  const auto index = static_cast<std::size_t>(head.number - world.waited);
  if (index >= world.flights.size()) {
    ++early_ready_[static_cast<std::size_t>(peer)];
    return world.ready.emplace(std::tuple(head.number, peer, head.round), ready).second;
  }
  const std::shared_ptr<TcpFlight>& flight = world.flights[index];
  take_ready(world, *flight, peer, head.round, ready);
  start_sends(flight);
  return true;
}

bool TcpTransportContext::gather_received(TcpWorldState& world, int peer, const FrameHead& head,
                                          std::string body) const {
  // A collective that this rank has given up or finished needs no more parts.
  if (head.number < world.begun && !world.collectives.contains(head.number)) return false;
  TcpWorldState::CollectiveState& collective = world.collectives[head.number];
  collective.parts.resize(links_.size());
  std::optional<std::string>& part = collective.parts[static_cast<std::size_t>(peer)];
  if (part) return false;
  part = std::move(body);
  ++collective.came;
  return true;
}

void TcpTransportContext::check_alive_locked() const {
  if (!reports_.empty()) {
    const auto& [rank, report] = *reports_.begin();
    fail_rank(aborted_error(names_, rank, report));
  }
  if (given_up_) fail_rank(*given_up_);
}

void TcpTransportContext::check_alive() {
  if (!over_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex);
  check_alive_locked();
}

void TcpTransportContext::give_up(const Error& failure) {
  const std::lock_guard lock(mutex);
  if (!given_up_) given_up_ = failure;
  over_ = true;
}

bool TcpTransportContext::all_small_sent() const {
  return std::ranges::all_of(links_, [](const TcpLink& link) { return !link.is_open() || link.small_frames_sent(); });
}

void TcpTransportContext::notify_all_ranks(int rank, const Error& error) {
  const std::string notice = pack_error(error).substr(0, kMaxNotice);
  for (TcpLink& link : links_) {
    if (!link.is_open()) continue;
    link.send({.kind = FrameKind::kNotice, .round = rank}, notice);
    flush(link);
  }
}

bool TcpTransportContext::abort(const Error& error) {
  std::unique_lock lock(mutex);
  const bool notified = std::exchange(notified_, true);
  if (!reports_.empty()) {
    // A rank may see this process end before it receives the notice of the rank that has failed.
    if (!notified) notify_all_ranks(reports_.begin()->first, reports_.begin()->second);
    return false;
  }
  notify_all_ranks(rank_, error);
  reports_.emplace(rank_, error);
  over_ = true;
  changed_.notify_all();
  // Rank 0 is the lowest, and a rank that has heard of a lower one already knows that it does not print.
  changed_.wait_for(lock, std::chrono::duration<double>(kReportSeconds),
                    [&] { return all_small_sent() && (rank_ == 0 || reports_.begin()->first != rank_); });
  return reports_.begin()->first == rank_;
}

void TcpTransportContext::set_failure_callback(std::function<void(const Error&)> callback) {
  const std::lock_guard lock(mutex);
  failure_callback_ = std::move(callback);
}

void TcpTransportContext::await_printer(double seconds) {
  std::unique_lock lock(mutex);
  const int printer = reports_.empty() ? rank_ : reports_.begin()->first;
  const TcpLink& link = links_[static_cast<std::size_t>(printer)];
  changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return !link.is_open(); });
}

std::string TcpTransportContext::take_heartbeats(int peer) {
  const std::lock_guard lock(mutex);
  return std::exchange(heartbeats_[static_cast<std::size_t>(peer)], {});
}

bool TcpTransportContext::send_heartbeat(int peer, char heartbeat, bool last) {
  const std::lock_guard lock(mutex);
  TcpLink& link = links_[static_cast<std::size_t>(peer)];
  if (!link.is_open()) return true;  // it has left and needs no heartbeat
  if (!link.small_frames_sent()) return false;
  moved_ -= sizeof(FrameHead);  // as above, because flush() counts these bytes
  if (last) link.send({.kind = FrameKind::kLeave});
  link.send(
      {.kind = FrameKind::kHeartbeat, .shape = static_cast<std::uint32_t>(static_cast<unsigned char>(heartbeat))});
  flush(link);
  return true;
}

}  // namespace ringattn
