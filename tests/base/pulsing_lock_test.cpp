// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "base/error.hpp"
#include "base/heartbeat_lock.hpp"

namespace ringattn {
namespace {

// A rank that counts its heartbeats, and may hear of a silent one.
class CountedLiveness final : public RankLiveness {
 public:
  CountedLiveness() : RankLiveness(1) {}

  std::atomic<int> heartbeats{0};
  std::atomic<bool> other_is_silent{false};

 private:
  void on_heartbeat() override {
    ++heartbeats;
    if (other_is_silent) throw Error(ErrorCode::kPeer, "rank 0 fell silent");
  }
};

TEST(PulsingLock, ARankThatWaitsSendsHeartbeats) {
  std::mutex mutex;
  std::unique_lock made(mutex);
  CountedLiveness liveness;
  std::atomic<bool> held{false};
  std::thread rank([&] {
    const RankLivenessScope scope(liveness);
    const auto lock = lock_with_heartbeat(mutex);
    held = lock.owns_lock();
  });
  while (liveness.heartbeats < 3) std::this_thread::yield();
  EXPECT_FALSE(held);
  made.unlock();
  rank.join();
  EXPECT_TRUE(held);
}

TEST(PulsingLock, ARankThatWaitsHearsOfASilentOne) {
  std::mutex mutex;
  const std::lock_guard made(mutex);
  CountedLiveness liveness;
  liveness.other_is_silent = true;
  const RankLivenessScope scope(liveness);
  EXPECT_THROW(static_cast<void>(lock_with_heartbeat(mutex)), Error);
}

TEST(PulsingLock, NeedsNoHeartbeat) {
  std::mutex mutex;
  EXPECT_TRUE(lock_with_heartbeat(mutex).owns_lock());
}

}  // namespace
}  // namespace ringattn
