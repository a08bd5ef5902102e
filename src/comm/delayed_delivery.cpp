// SPDX-License-Identifier: Apache-2.0
#include "comm/delayed_delivery.hpp"

#include <utility>

namespace ringattn {

DelayedDelivery::DelayedDelivery(int threads) {
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
  } catch (...) {
    end();  // joins the threads that were started
    throw;
  }
}

void DelayedDelivery::end() noexcept {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void DelayedDelivery::submit(Clock::time_point due, std::uint64_t priority, std::function<void()> deliver) {
  {
    const std::lock_guard lock(mutex_);
    delayed_.push({due, priority, std::move(deliver)});
  }
  changed_.notify_one();
}

void DelayedDelivery::run() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    while (!delayed_.empty() && delayed_.top().due <= Clock::now()) {
      ready_.push(delayed_.top());
      delayed_.pop();
    }
    if (!ready_.empty()) {
      const std::function<void()> deliver = ready_.top().deliver;
      ready_.pop();
      lock.unlock();
      deliver();
      lock.lock();
    } else if (delayed_.empty()) {
      changed_.wait(lock);
    } else {
      const Clock::time_point due = delayed_.top().due;
      changed_.wait_until(lock, due);
    }
  }
}

}  // namespace ringattn
