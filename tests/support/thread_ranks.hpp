// SPDX-License-Identifier: Apache-2.0
// A world of threads that has only an all-gather, for tests of what ranks do besides transfers.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn::testing {

class ThreadRanks {
 public:
  explicit ThreadRanks(int size) : gathered_(static_cast<std::size_t>(size)) {}

  std::vector<std::string> all_gather(int rank, std::string_view bytes, const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    const auto wait = [&](auto ready) {
      if (!changed_.wait_until(lock, deadline.end(), ready)) fail(ErrorCode::kPeer, "a rank of the test is missing");
    };
    wait([&] { return !leaving_; });
    gathered_[static_cast<std::size_t>(rank)] = bytes;
    max_bytes_ = std::max(max_bytes_, bytes.size());
    if (++inside_ == gathered_.size()) {
      leaving_ = true;
      changed_.notify_all();
    }
    wait([&] { return leaving_; });
    std::vector<std::string> all = gathered_;
    if (--inside_ == 0) {
      leaving_ = false;
      changed_.notify_all();
    }
    return all;
  }

  std::size_t max_bytes() const { return max_bytes_; }
  int size() const { return static_cast<int>(gathered_.size()); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> gathered_;
  std::size_t inside_ = 0;
  std::size_t max_bytes_ = 0;
  bool leaving_ = false;
};

class ThreadRank final : public Bootstrap {
 public:
  ThreadRank(ThreadRanks& world, int rank) : world_(world), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return world_.size(); }
  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    return world_.all_gather(rank_, bytes, deadline);
  }
  void barrier(const Deadline& deadline) override { world_.all_gather(rank_, {}, deadline); }

 private:
  ThreadRanks& world_;
  int rank_;
};

// Runs `body` on `size` threads and rethrows the first rank's error; returns the longest message of an all-gather.
inline std::size_t run_thread_ranks(int size, const std::function<void(Bootstrap&)>& body) {
  ThreadRanks world(size);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ThreadRank bootstrap(world, rank);
        body(bootstrap);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return world.max_bytes();
}

}  // namespace ringattn::testing
