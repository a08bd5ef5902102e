// SPDX-License-Identifier: Apache-2.0
#include "base/pulsing_lock.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "base/error.hpp"

namespace ringattn {
namespace {

// A rank that counts its signs, and may hear of a silent one.
class CountedPulse final : public Pulse {
 public:
  CountedPulse() : Pulse(1) {}

  std::atomic<int> signs{0};
  std::atomic<bool> other_is_silent{false};

 private:
  void exchange() override {
    ++signs;
    if (other_is_silent) throw Error(ErrorCode::kPeer, "rank 0 fell silent");
  }
};

TEST(PulsingLock, ARankThatWaitsGivesSigns) {
  std::mutex mutex;
  std::unique_lock made(mutex);
  CountedPulse pulse;
  std::atomic<bool> held{false};
  std::thread rank([&] {
    const PulseScope scope(pulse);
    const auto lock = lock_with_pulse(mutex);
    held = lock.owns_lock();
  });
  while (pulse.signs < 3) std::this_thread::yield();
  EXPECT_FALSE(held);
  made.unlock();
  rank.join();
  EXPECT_TRUE(held);
}

TEST(PulsingLock, ARankThatWaitsHearsOfASilentOne) {
  std::mutex mutex;
  const std::lock_guard made(mutex);
  CountedPulse pulse;
  pulse.other_is_silent = true;
  const PulseScope scope(pulse);
  EXPECT_THROW(static_cast<void>(lock_with_pulse(mutex)), Error);
}

TEST(PulsingLock, NeedsNoPulse) {
  std::mutex mutex;
  EXPECT_TRUE(lock_with_pulse(mutex).owns_lock());
}

}  // namespace
}  // namespace ringattn
