// SPDX-License-Identifier: Apache-2.0
// A pool of threads that process work items, while the calling thread also drives communication (Progress).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/common/backend.hpp"

namespace ringattn::cpu {

// Threads ask it between parts of an item whether to stop. On the calling thread it first runs the caller's progress,
// which may throw.
struct Checkpoint {
  const std::atomic<bool>& stop;
  const Progress* progress = nullptr;

  bool should_stop() const {
    if (progress != nullptr && *progress) (*progress)();
    return stop.load(std::memory_order_relaxed);
  }
};

// Hands out work items to threads, until all are done or one thread fails.
class ThreadPool {
 public:
  explicit ThreadPool(std::int64_t items) : items_(items) {}

  // The next item, or −1.
  std::int64_t take() {
    if (stop_.load(std::memory_order_relaxed)) return -1;
    const std::int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    return item < items_ ? item : -1;
  }

  // Calls work(thread, checkpoint) once in each of `threads` threads, which take items until there are none. After all
  // have returned, rethrows the first exception of any of them.
  template <typename Work>
  void run(int threads, const Progress& progress, Work work) {
    std::atomic<int> ended{0};
    const auto run_thread = [&](int thread, int started) {
      const bool is_caller = thread == 0;
      guard([&] { work(thread, Checkpoint{stop_, is_caller ? &progress : nullptr}); });
      ended.fetch_add(1, std::memory_order_release);
      if (!is_caller || !progress) return;
      // Communication continues while other threads finish their last items. At least one call, so that every run
      // polls.
      guard([&] {
        while (!stop_.load(std::memory_order_relaxed)) {
          progress();
          if (ended.load(std::memory_order_acquire) == started) break;
          std::this_thread::yield();
        }
      });
    };
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    run_thread(omp_get_thread_num(), omp_get_num_threads());
#else
    static_cast<void>(threads);
    run_thread(0, 1);
#endif
    if (error_) std::rethrow_exception(error_);
  }

 private:
  // Runs `part` and stores its exception if it is the first: no exception may leave a parallel region.
  template <typename Part>
  void guard(Part part) {
    try {
      part();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      stop_ = true;
    }
  }

  std::int64_t items_;
  std::atomic<std::int64_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace ringattn::cpu
