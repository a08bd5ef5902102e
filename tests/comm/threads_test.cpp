// SPDX-License-Identifier: Apache-2.0
// What is particular to transport `threads`: how worlds of threads end, and delivery that tests control.
#include "comm/threads.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>

namespace ringattn {
namespace {

Deadline test_deadline() { return Deadline::after(20.0); }

TEST(RunThreadsWorld, RethrowsTheFirstErrorAsItWas) {
  try {
    run_threads_world(8, {}, [](Transport& world) {
      if (world.rank() == 5) throw Error(ErrorCode::kFile, "can't open x.");
      world.barrier(test_deadline());
    });
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kFile);
    EXPECT_STREQ(error.what(), "can't open x.");
  }
}

TEST(RunThreadsWorld, KeepsForeignExceptionsAndTellsTheOthersACode) {
  std::atomic<int> told{0};
  EXPECT_THROW(run_threads_world(3, {},
                                 [&](Transport& world) {
                                   if (world.rank() == 1) throw std::bad_alloc();
                                   try {
                                     world.barrier(test_deadline());
                                   } catch (const Error& error) {
                                     if (error.code() == ErrorCode::kMemory) ++told;
                                     throw;
                                   }
                                 }),
               std::bad_alloc);
  EXPECT_EQ(told, 2);
}

TEST(RunThreadsWorld, PassesAgreedErrorsOn) {
  EXPECT_THROW(run_threads_world(4, {},
                                 [](Transport& world) {
                                   const Error mine(ErrorCode::kFile, "no.");
                                   agree(world, world.rank() == 2 ? &mine : nullptr, test_deadline());
                                 }),
               AgreedError);
}

TEST(RunThreadsWorld, RefusesAnEmptyWorld) {
  EXPECT_THROW(run_threads_world(0, {}, [](Transport&) {}), Error);
  EXPECT_THROW(run_threads_world(-1, {}, [](Transport&) {}), Error);
}

// One sender and one receiver; the message can't be delivered before `max_delay` has been drawn, so most of the time
// the receiver gives up first. Whatever comes first, its memory is never touched afterwards.
TEST(ThreadsWorld, NeverTouchesAbandonedMemory) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    ThreadsDelivery slow;
    slow.shuffle_seed = seed;
    slow.max_delay = std::chrono::milliseconds(2);
    auto world = make_threads_world(2, slow);
    const std::vector<std::byte> source(100'000, std::byte{1});
    std::vector<std::byte> target(source.size());
    world[0]->post({"", {{1, 0, {{source.data(), source.size()}}}}, {}}, Stream{});
    world[1]->post({"", {}, {{0, 0, {{target.data(), target.size()}}}}}, Stream{});
    world[1]->abandon();
    const bool delivered = target.front() == std::byte{1};
    std::fill(target.begin(), target.end(), std::byte{2});
    world.clear();  // joins the deliveries
    EXPECT_EQ(std::count(target.begin(), target.end(), std::byte{2}), static_cast<std::ptrdiff_t>(target.size()))
        << "seed " << seed << (delivered ? ", delivered before" : "");
  }
}

// One rank sends to twelve at once. In order of posting, rank 1 would always be the first to have its message.
TEST(ThreadsWorld, ShufflesDelivery) {
  constexpr int kPeers = 12;
  bool shuffled = false;
  for (std::uint64_t seed = 1; seed <= 20 && !shuffled; ++seed) {
    ThreadsDelivery delivery;
    delivery.shuffle_seed = seed;
    delivery.max_delay = std::chrono::milliseconds(20);
    auto world = make_threads_world(kPeers + 1, delivery);
    const std::byte source{1};
    std::vector<std::byte> targets(kPeers);
    Exchange exchange;
    for (int peer = 1; peer <= kPeers; ++peer) exchange.sends.push_back({peer, 0, {{&source, 1}}});
    world[0]->post(exchange, Stream{});
    for (std::size_t peer = 1; peer <= kPeers; ++peer) {
      world[peer]->post({"", {}, {{0, 0, {{&targets[peer - 1], 1}}}}}, Stream{});
    }
    std::size_t first = 0;
    for (const Deadline deadline = test_deadline(); first == 0 && !deadline.expired();) {
      for (std::size_t peer = 1; peer <= kPeers && first == 0; ++peer) {
        if (world[peer]->finished(0)) first = peer;
      }
    }
    shuffled = first > 1;
    world[0]->wait(0, Stream{}, test_deadline());
    EXPECT_EQ(std::count(targets.begin(), targets.end(), std::byte{1}), kPeers);
  }
  EXPECT_TRUE(shuffled);
}

TEST(ThreadsWorld, LivesUntilItsLastTransportIsGone) {
  auto world = make_threads_world(3);
  world[0].reset();
  world[2].reset();
  EXPECT_NO_THROW(world[1]->progress());
}

}  // namespace
}  // namespace ringattn
