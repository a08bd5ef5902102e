// SPDX-License-Identifier: Apache-2.0
// The clock of a paced transport. Lower bounds only: a busy machine may be slower, a link never faster.
#include "comm/paced.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"

namespace ringattn {
namespace {

constexpr double kRate = 50e6;  // bytes per second
Deadline test_deadline() { return Deadline::after(20.0); }

// Two ranks, each sending `bytes` to the other in each of `rounds` rounds of each of `exchanges` exchanges.
double measure(std::size_t bytes, int rounds, int exchanges) {
  auto world = make_threads_world(2);
  for (auto& rank : world) rank = make_paced_transport(std::move(rank), kRate);
  const auto start = Deadline::Clock::now();
  run_ranks(std::move(world), [&](Transport& rank) {
    const std::vector<std::byte> source(bytes);
    std::vector<std::byte> target(bytes * static_cast<std::size_t>(rounds * exchanges));
    std::byte* next = target.data();
    for (int i = 0; i < exchanges; ++i) {
      Exchange exchange;
      for (int round = 0; round < rounds; ++round) {
        exchange.sends.push_back({1 - rank.rank(), round, {{source.data(), bytes}}});
        exchange.receives.push_back({1 - rank.rank(), round, {{next, bytes}}});
        next += bytes;
      }
      rank.post(exchange, Stream{});
    }
    for (Ticket ticket = 0; ticket < exchanges; ++ticket) rank.wait(ticket, Stream{}, test_deadline());
  });
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

TEST(Paced, TakesTheTimeOfTheLink) {
  constexpr std::size_t kBytes = 500'000;
  const double message = static_cast<double>(kBytes) / kRate;
  EXPECT_GE(measure(kBytes, 1, 1), message);      // both directions at once
  EXPECT_GE(measure(kBytes, 2, 1), 2 * message);  // rounds one after the other
  EXPECT_GE(measure(kBytes, 1, 3), 3 * message);  // exchanges too
  EXPECT_GE(measure(kBytes, 4, 1), 4 * message);  // more rounds than ranks
}

// Without a call nothing starts: the second exchange is still held back when the first has long passed.
TEST(Paced, StartsHeldBackRoundsOnlyWhenPolled) {
  constexpr std::size_t kBytes = 1000;
  const double message = 0.02;  // seconds of the link
  const std::vector<std::byte> source(kBytes);
  std::vector<std::byte> target(2 * kBytes);
  std::vector<std::unique_ptr<Transport>> world;
  // Again if this thread was held up so long that the link was free before the second post.
  for (double elapsed = message; elapsed >= message;) {
    world = make_threads_world(2);
    for (auto& rank : world) rank = make_paced_transport(std::move(rank), static_cast<double>(kBytes) / message);
    const auto start = Deadline::Clock::now();
    for (std::byte* part : {target.data(), target.data() + kBytes}) {
      world[0]->post({"", {{1, 0, {{source.data(), kBytes}}}}, {}}, Stream{});
      world[1]->post({"", {}, {{0, 0, {{part, kBytes}}}}}, Stream{});
    }
    elapsed = std::chrono::duration<double>(Deadline::Clock::now() - start).count();
  }
  world[0]->wait(0, Stream{}, test_deadline());
  for (const Deadline twice = Deadline::after(2 * message); !twice.expired();) world[0]->progress();
  // Both messages could have passed by now, had rank 1 been polled.
  EXPECT_FALSE(world[1]->finished(1));
  world[1]->wait(0, Stream{}, test_deadline());
  for (const Deadline deadline = test_deadline(); !world[1]->finished(1) && !deadline.expired();) {
    world[0]->progress();
    world[1]->progress();
  }
  EXPECT_TRUE(world[1]->finished(1));
}

TEST(Paced, BlamesThePaceWhenItIsThePace) {
  auto world = make_threads_world(2);
  for (auto& rank : world) rank = make_paced_transport(std::move(rank), 100.0);
  const std::vector<std::byte> source(1000);
  std::vector<std::byte> target(1000);
  world[0]->post({"", {{1, 0, {{source.data(), 1000}}}}, {}}, Stream{});
  world[1]->post({"block 1", {}, {{0, 0, {{target.data(), 1000}}}}}, Stream{});
  try {
    world[1]->wait(0, Stream{}, Deadline::after(0.1));  // the link takes 10 s
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kPeer);
    EXPECT_NE(std::string(error.what()).find("RINGATTN_PACE"), std::string::npos) << error.what();
  }
}

TEST(Paced, RefusesRatesThatNeverFinish) {
  for (const double rate : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(make_paced_transport(make_self_transport(), rate), Error) << rate;
  }
}

TEST(Paced, SaysWhatItIs) { EXPECT_EQ(make_paced_transport(make_self_transport(), 1.0)->name(), "paced self"); }

}  // namespace
}  // namespace ringattn
