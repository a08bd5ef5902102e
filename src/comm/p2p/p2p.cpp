// SPDX-License-Identifier: Apache-2.0
// post() and wait() of transport `p2p`. Pushes are in push.cpp, failures in failure.cpp.
#include "comm/p2p/p2p.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "comm/collective.hpp"
#include "comm/exchange.hpp"
#include "comm/p2p/p2p_transport.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

// Pauses a host that waits for other hosts between two polls.
void back_off(int idle) {
  constexpr int kYields = 2000;
  constexpr std::chrono::microseconds kSleep{20};
  if (idle < kYields) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(kSleep);  // leaves the core to ranks that share it
  }
}

std::uint32_t counter_value(Ticket ticket) { return static_cast<std::uint32_t>(ticket + 1); }

}  // namespace

P2pTransport::P2pTransport(std::unique_ptr<Transport> control, std::unique_ptr<P2pSegment> segment,
                           std::shared_ptr<P2pMemory> memory, RankNames names, const P2pOptions& options)
    : control_(std::move(control)),
      segment_(std::move(segment)),
      memory_(std::move(memory)),
      names_(std::move(names)),
      options_(options),
      rank_(control_->rank()),
      size_(control_->size()),
      device_(memory_->device()),
      own_processes_(!memory_->any_share_a_process(size_)),
      mailboxes_(*segment_, rank_, size_),
      sent_to_(static_cast<std::size_t>(size_)),
      received_from_(static_cast<std::size_t>(size_)),
      pushed_to_(static_cast<std::size_t>(size_)) {
  const DeviceGuard guard(device_);
  for (int lane = 0; lane < options_.lanes; ++lane) {
    lanes_.emplace_back();
    joins_.emplace_back();
  }
  gate_.emplace();
  last_.emplace();
}

// Also closes memory that peers have freed, because all ranks are here. It returns to its device once all of them have
// closed it.
std::vector<std::string> P2pTransport::all_gather(std::string_view bytes, const Deadline& deadline) {
  const std::vector<std::uint64_t> dead = broken_ ? std::vector<std::uint64_t>() : memory_->dead();
  const std::uint64_t count = dead.size();
  std::string mine(reinterpret_cast<const char*>(&count), sizeof count);
  mine.append(reinterpret_cast<const char*>(dead.data()), dead.size() * sizeof(std::uint64_t));
  mine.append(bytes);
  std::vector<std::string> all = control_->all_gather(mine, deadline);
  bool any = false;
  for (int peer = 0; peer < size_; ++peer) {
    std::string& theirs = all[static_cast<std::size_t>(peer)];
    const auto freed = gathered_value<std::uint64_t>(theirs);
    for (std::uint64_t i = 0; i < freed; ++i) {
      const auto id = gathered_value<std::uint64_t>(theirs, (1 + i) * sizeof(std::uint64_t));
      if (peer != rank_) {
        memory_->close(peer, id);
        mailboxes_.forget(peer, id);
      }
      any = true;
    }
    theirs.erase(0, (1 + freed) * sizeof(std::uint64_t));
  }
  if (any) {
    control_->barrier(deadline);
    memory_->closed_by(size_, dead);
  }
  return all;
}

void P2pTransport::check_stream(Stream stream, std::string_view what) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(cuda_stream(stream), &status);
  if (result == cudaErrorStreamCaptureImplicit) cudaGetLastError();
  if (result != cudaErrorStreamCaptureImplicit) check_cuda(result, "cudaStreamIsCapturing");
  if (result == cudaSuccess && status == cudaStreamCaptureStatusNone) return;
  fail(ErrorCode::kUsage, fmt::format("can't {} on a stream that is being captured", what),
       "a graph would replay the flags of this one exchange", "Capture around it.");
}

// Orders `stream` after the previous call's stream, if that was another one.
void P2pTransport::follow_last(cudaStream_t stream) {
  if (last_stream_ && *last_stream_ != stream) {
    check_cuda(cudaStreamWaitEvent(stream, last_->get(), 0), "cudaStreamWaitEvent");
  }
}

void P2pTransport::remember_last(cudaStream_t stream) {
  last_->record(stream);
  last_stream_ = stream;
}

CudaEvent P2pTransport::acquire_event() {
  if (events_.empty()) return CudaEvent();
  CudaEvent event = std::move(events_.back());
  events_.pop_back();
  return event;
}

void P2pTransport::release_event(std::optional<CudaEvent>& event) {
  if (event) events_.push_back(std::move(*event));
  event.reset();
}

// Describes where a message may be written. The allocations are held from here on.
ReceiveNotice P2pTransport::make_receive_notice(const ReceiveMessage& message, const std::string& name) {
  ReceiveNotice notice;
  notice.round = message.round;
  std::shared_ptr<const DeviceAllocation> allocation;
  for (const ReceiveSpan& span : message.spans) {
    if (span.bytes == 0) continue;
    const auto inside = [&] {
      return allocation != nullptr && span.data >= allocation->base &&
             span.data + span.bytes <= allocation->base + allocation->bytes;
    };
    if (!inside()) {
      allocation = find_device_allocation(span.data, span.bytes);
      if (allocation == nullptr || allocation->device != device_) {
        fail(ErrorCode::kUsage, fmt::format("{} can't receive {}", names_.name(rank_), name),
             fmt::format("the {} bytes at {} are not memory of allocate_device() on GPU {}, which peers could map",
                         span.bytes, static_cast<const void*>(span.data), device_),
             {"Receive into such a Buffer, or use ", setting("transport", "nccl"), "."});
      }
      if (!mailboxes_.has_described(message.peer, allocation->id)) {
        mailboxes_.describe(message.peer, memory_->export_to(message.peer, allocation));
      }
    }
    const auto offset = static_cast<std::uint64_t>(span.data - allocation->base);
    Run* last = notice.runs.empty() ? nullptr : &notice.runs.back();
    if (last != nullptr && last->allocation == allocation->id && last->offset + last->bytes == offset) {
      last->bytes += span.bytes;
    } else {
      notice.runs.push_back({allocation->id, offset, span.bytes});
    }
  }
  return notice;
}

// Returns when this rank's notices are sent and the notices for its own sends have arrived.
std::int64_t P2pTransport::announce(std::span<const Exchange> exchanges, const Deadline& deadline) {
  check_alive();
  const DeviceGuard guard(device_);
  const std::int64_t first = announced_;
  announced_ += static_cast<std::int64_t>(exchanges.size());
  for (std::size_t i = 0; i < exchanges.size(); ++i) {
    for (const ReceiveMessage& message : exchanges[i].receives) {
      ReceiveNotice notice = make_receive_notice(message, exchanges[i].label);
      notice.announced = first + static_cast<std::int64_t>(i);
      mailboxes_.post(message.peer, notice);
    }
  }
  const auto not_heard = [&] {
    std::set<int> peers;
    for (std::size_t i = 0; i < exchanges.size(); ++i) {
      for (const SendMessage& message : exchanges[i].sends) {
        const std::int64_t exchange = first + static_cast<std::int64_t>(i);
        if (mailboxes_.announced(message.peer, exchange, message.round) == nullptr) peers.insert(message.peer);
      }
    }
    return std::vector<int>(peers.begin(), peers.end());
  };
  mailboxes_.move(*memory_);
  for (int idle = 0; !mailboxes_.all_sent() || !not_heard().empty(); ++idle) {
    if (wait_expired(deadline)) fail_late("the announcement of exchanges", deadline, names_, rank_, not_heard());
    back_off(idle);
    progress();
  }
  return first;
}

Ticket P2pTransport::post(Exchange exchange, Stream stream) {
  check_alive();
  check_exchange(exchange, rank_, size_);
  const Ticket ticket = next_ticket();
  const std::string name = exchange_name(exchange, ticket);
  if (broken_) {
    fail(ErrorCode::kInternal, fmt::format("rank {} can't post {}", rank_, name), "it has given up earlier exchanges",
         "Abort the world after a failure.");
  }
  const DeviceGuard guard(device_);
  check_stream(stream, "post");
  std::vector<ReceiveNotice> notices;
  const bool announced = exchange.announced != kNotAnnounced;
  for (const ReceiveMessage& message : exchange.receives) {
    notices.push_back(announced ? ReceiveNotice() : make_receive_notice(message, name));
  }

  Flight flight;
  flight.exchange = std::move(exchange);
  flight.ticket = ticket;
  flight.waiting = flight.exchange.sends.size();
  flight.pushes.assign(flight.waiting, Push::kWaiting);
  flight.order.resize(flight.waiting);
  std::iota(flight.order.begin(), flight.order.end(), std::size_t{0});
  const auto& sends = flight.exchange.sends;
  std::stable_sort(flight.order.begin(), flight.order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(sends[a].round, distance_to(sends[a].peer)) <
           std::pair(sends[b].round, distance_to(sends[b].peer));
  });
  std::vector<bool> receivers(static_cast<std::size_t>(size_));
  for (const SendMessage& message : sends) receivers[static_cast<std::size_t>(message.peer)] = true;
  flight.spread = std::count(receivers.begin(), receivers.end(), true) < static_cast<std::ptrdiff_t>(lanes_.size());

  // All receive memory of this exchange is free at once, so one `ready` write per sender suffices.
  std::vector<std::uint32_t> numbers = received_from_;
  for (std::size_t i = 0; i < notices.size(); ++i) {
    const ReceiveMessage& message = flight.exchange.receives[i];
    notices[i].ticket = ticket;
    notices[i].number = ++numbers[static_cast<std::size_t>(message.peer)];
    flight.receive_numbers.push_back(notices[i].number);
  }
  follow_last(cuda_stream(stream));
  MemoryOperations ready = segment_->operations();
  std::vector<int> senders;
  for (int peer = 0; peer < size_; ++peer) {
    if (numbers[static_cast<std::size_t>(peer)] != received_from_[static_cast<std::size_t>(peer)])
      senders.push_back(peer);
  }
  for (const int peer : senders) ready.write(from(peer).ready, numbers[static_cast<std::size_t>(peer)]);
  ready.enqueue(cuda_stream(stream));
  for (const int peer : senders) {
    from(peer).posted.value.store(numbers[static_cast<std::size_t>(peer)], std::memory_order_release);
  }
  if (flight.waiting > 0) {
    flight.posted.emplace(acquire_event());
    flight.posted->record(cuda_stream(stream));
  }
  remember_last(cuda_stream(stream));

  received_from_ = std::move(numbers);
  for (const SendMessage& message : sends) {
    flight.send_numbers.push_back(++sent_to_[static_cast<std::size_t>(message.peer)]);
  }
  for (std::size_t i = 0; i < notices.size() && !announced; ++i) {
    mailboxes_.post(flight.exchange.receives[i].peer, notices[i]);
  }
  flights_.push_back(std::move(flight));
  pump();
  return ticket;
}

void P2pTransport::wait(Ticket ticket, Stream stream, const Deadline& deadline) {
  try {
    check_ticket(ticket, waited_, next_ticket());
    const DeviceGuard guard(device_);
    check_stream(stream, "wait");
    Flight& flight = flights_.front();
    progress();
    for (int idle = 0; flight.waiting > 0 || (waits_for_hosts(flight) && !all_pushed(flight)); ++idle) {
      if (wait_expired(deadline)) {
        fail_late(exchange_name(flight.exchange, ticket), deadline, names_, rank_, awaited_by_host(flight));
      }
      back_off(idle);
      progress();
    }
    const bool done = finished(ticket);
    enqueue_wait(flight, cuda_stream(stream));
    flight.seconds = done ? std::numeric_limits<double>::infinity() : deadline.seconds();
    on_device_.push_back(std::move(flight));
    flights_.pop_front();
    ++waited_;
    drop_passed();
  } catch (...) {
    abandon();
    throw;
  }
}

void P2pTransport::enqueue_wait(Flight& flight, cudaStream_t stream) {
  follow_last(stream);
  // The numbers of a pair ascend, so waiting for the last one is enough.
  std::map<const Counter*, std::uint32_t> last;
  for (std::size_t i = 0; i < flight.receive_numbers.size(); ++i) {
    last[&from(flight.exchange.receives[i].peer).done] = flight.receive_numbers[i];
  }
  for (std::size_t i = 0; i < flight.send_numbers.size(); ++i) {
    if (flight.pushes[i] == Push::kEnqueued) last[&to(flight.exchange.sends[i].peer).done] = flight.send_numbers[i];
  }
  MemoryOperations operations = segment_->operations();
  operations.write(segment_->rank(rank_).reached, counter_value(flight.ticket));
  for (const auto& [counter, number] : last) {
    if (!counter->reached(number)) operations.wait(*counter, number);
  }
  operations.write(segment_->rank(rank_).passed, counter_value(flight.ticket));
  operations.enqueue(stream);
  release_event(flight.posted);
  remember_last(stream);
}

void P2pTransport::progress() {
  check_alive();
  if (broken_) return;
  const DeviceGuard guard(device_);
  pump();
  drop_passed();
  check_on_device();
}

bool P2pTransport::finished(Ticket ticket) {
  const auto index = static_cast<std::size_t>(ticket - waited_);
  if (ticket < waited_ || index >= flights_.size()) return false;
  const Flight& flight = flights_[index];
  if (flight.waiting > 0) return false;
  for (std::size_t i = 0; i < flight.send_numbers.size(); ++i) {
    if (!sent(flight, i)) return false;
  }
  for (std::size_t i = 0; i < flight.receive_numbers.size(); ++i) {
    if (!received(flight, i)) return false;
  }
  return true;
}

std::unique_ptr<Transport> P2pTransport::split_world(int size, const Deadline& deadline) {
  check_alive();
  check_split(size, size_);
  std::unique_ptr<Transport> control = control_->split_world(size, deadline);
  if (control == nullptr) return nullptr;
  try {
    auto segment = std::make_unique<P2pSegment>(*control, deadline);
    return std::make_unique<P2pTransport>(std::move(control), std::move(segment), memory_, names_, options_);
  } catch (const AgreedError& error) {
    throw Error(error);  // agreed among these ranks only
  }
}

}  // namespace ringattn
