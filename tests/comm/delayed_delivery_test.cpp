// SPDX-License-Identifier: Apache-2.0
#include "comm/delayed_delivery.hpp"

#include <gtest/gtest.h>

#include <future>
#include <vector>

namespace ringattn {
namespace {

using Clock = DelayedDelivery::Clock;

TEST(DelayedDelivery, TakeTheLowestPriorityNumberOfWhatIsDue) {
  std::vector<int> order;
  std::promise<void> gate;
  std::promise<void> done;
  DelayedDelivery deliveries(1);
  deliveries.submit(Clock::now(), 0, [&] { gate.get_future().wait(); });  // all others are due when it ends
  for (const int priority : {5, 2, 9, 1, 7}) {
    deliveries.submit(Clock::now(), static_cast<std::uint64_t>(priority), [&, priority] {
      order.push_back(priority);
      if (order.size() == 5) done.set_value();
    });
  }
  gate.set_value();
  done.get_future().wait();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 5, 7, 9}));
}

TEST(DelayedDelivery, WaitForTheTimeOfADelivery) {
  std::promise<Clock::time_point> delivered;
  DelayedDelivery deliveries(2);
  const Clock::time_point due = Clock::now() + std::chrono::milliseconds(20);
  deliveries.submit(due, 0, [&] { delivered.set_value(Clock::now()); });
  EXPECT_GE(delivered.get_future().get(), due);
}

TEST(DelayedDelivery, DropWhatHasNotBegun) {
  bool delivered = false;
  {
    DelayedDelivery deliveries(1);
    deliveries.submit(Clock::now() + std::chrono::hours(1), 0, [&] { delivered = true; });
  }
  EXPECT_FALSE(delivered);
}

}  // namespace
}  // namespace ringattn
