// SPDX-License-Identifier: Apache-2.0
// Background threads that run deliveries. None runs before its due time. Among those that are due, the one with the
// lowest priority number runs first.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <queue>
#include <thread>
#include <vector>

namespace ringattn {

class DelayedDelivery {
 public:
  using Clock = std::chrono::steady_clock;

  // Throws std::system_error if the threads can't be started.
  explicit DelayedDelivery(int threads);
  // Finishes the deliveries that have begun and drops the rest.
  ~DelayedDelivery() { end(); }
  DelayedDelivery(const DelayedDelivery&) = delete;
  DelayedDelivery& operator=(const DelayedDelivery&) = delete;

  // `deliver` must not throw.
  void submit(Clock::time_point due, std::uint64_t priority, std::function<void()> deliver);

 private:
  struct Delivery {
    Clock::time_point due;
    std::uint64_t priority;
    std::function<void()> deliver;
  };
  struct DueLater {
    bool operator()(const Delivery& a, const Delivery& b) const { return a.due > b.due; }
  };
  struct LessUrgent {
    bool operator()(const Delivery& a, const Delivery& b) const { return a.priority > b.priority; }
  };

  void run();
  void end() noexcept;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::priority_queue<Delivery, std::vector<Delivery>, DueLater> delayed_;
  std::priority_queue<Delivery, std::vector<Delivery>, LessUrgent> ready_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace ringattn
