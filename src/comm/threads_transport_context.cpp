// SPDX-License-Identifier: Apache-2.0
#include "comm/threads_transport_context.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/philox.hpp"
#include "comm/failure.hpp"

namespace ringattn {

namespace {

// More than one thread, so that a large message doesn't hold up all others. They only copy.
int delivery_thread_count() { return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 4, 2, 8); }

}  // namespace

ThreadsTransportContext::ThreadsTransportContext(int size, const ThreadsDelivery& delivery)
    : delivery_(delivery), wake_(static_cast<std::size_t>(size)), delayed_delivery_(delivery_thread_count()) {}

bool ThreadsTransportContext::abort(int rank, const Error& error) {
  const std::lock_guard lock(mutex);
  if (aborted_) return false;
  aborted_ = aborted_error(RankNames(), rank, error);
  over_.store(true, std::memory_order_release);
  for (std::condition_variable& wake : wake_) wake.notify_all();
  return true;
}

void ThreadsTransportContext::check_alive() {
  if (!over_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex);
  check_alive_locked();
}

void ThreadsTransportContext::start_sends(const std::shared_ptr<ThreadsFlight>& flight) {
  for (std::size_t i = 0; i < flight->sends.size(); ++i) {
    const SendMessage& message = flight->exchange.sends[i];
    ThreadsFlight::Send& send = flight->sends[i];
    if (!flight->gate.may_send(message.round)) break;
    if (send.started || send.to == nullptr) continue;
    send.started = true;
    const Schedule schedule = schedule_of(*flight, message);
    delayed_delivery_.submit(schedule.due, schedule.priority, [this, flight, i] { deliver(*flight, i); });
  }
}

// Delay and priority are functions of the seed and the message, so a seed gives the same delays for any thread timing.
ThreadsTransportContext::Schedule ThreadsTransportContext::schedule_of(const ThreadsFlight& flight,
                                                                       const SendMessage& message) {
  const PhiloxWords counter{{static_cast<std::uint32_t>(flight.ticket), static_cast<std::uint32_t>(message.round),
                             static_cast<std::uint32_t>(flight.rank), static_cast<std::uint32_t>(message.peer)}};
  const PhiloxWords random = philox4x32_10(counter, delivery_.shuffle_seed);
  const std::chrono::microseconds delay{random.word[0] % (static_cast<std::uint64_t>(delivery_.max_delay.count()) + 1)};
  const std::uint64_t priority = delivery_.shuffle_seed == 0 ? next_priority_++ : random.word[1];
  return {DelayedDelivery::Clock::now() + delay, priority};
}

// Runs on a delivery thread. Copies without the lock. `copying` keeps the spans alive meanwhile
// (ThreadsWorld::abandon()).
void ThreadsTransportContext::deliver(ThreadsFlight& from, std::size_t index) {
  std::unique_lock lock(mutex);
  const std::shared_ptr<ThreadsFlight> to = from.sends[index].to;
  if (aborted_ || from.withdrawn || to == nullptr || to->withdrawn) return;
  const SendMessage& source = from.exchange.sends[index];
  const std::size_t receive = from.sends[index].receive;
  const ReceiveMessage& target = to->exchange.receives[receive];
  ++from.copying;
  ++to->copying;
  lock.unlock();
  for (std::size_t i = 0; i < source.spans.size(); ++i) {
    if (source.spans[i].bytes > 0) std::memcpy(target.spans[i].data, source.spans[i].data, source.spans[i].bytes);
  }
  lock.lock();
  --from.copying;
  --to->copying;
  from.sends[index].done = true;
  from.sends[index].to.reset();  // breaks the reference cycle between flights
  --from.open;
  to->received[receive] = true;
  --to->open;
  to->gate.receive_done(target.round);
  if (!to->withdrawn) start_sends(to);
  if (from.open == 0 || from.withdrawn) notify(from.rank);
  if (to->open == 0 || to->withdrawn) notify(to->rank);
}

}  // namespace ringattn
