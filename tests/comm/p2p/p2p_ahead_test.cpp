// SPDX-License-Identifier: Apache-2.0
// Transport p2p between processes with a GPU each: no host waits for another one's post().
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/comm/exchanges.hpp"
#include "tests/comm/world_cases.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr int kRuns = 40;

// Posts an announced ring over and over and enqueues its waits. The device may not have done any of it on return.
void enqueue_runs(Transport& world, RingAllGather& ring, std::int64_t announced) {
  for (int run = 0; run < kRuns; ++run) {
    Exchange exchange = ring.exchange();
    exchange.announced = announced;
    world.wait(world.post(std::move(exchange), rank_stream()), rank_stream(), test_deadline());
  }
}

TEST(P2pAhead, AHostDoesNotWaitForThePeersHosts) {
  const WorldCase p2p = world_cases().front();
  if (!p2p.needs.empty()) GTEST_SKIP() << "needs " << p2p.needs;
  p2p.run([](Transport& world) {
    RingAllGather ring(world, 41, 100'000);
    const std::vector<Exchange> exchanges{ring.exchange()};
    const std::int64_t announced = world.announce(exchanges, test_deadline());
    // One rank after the other: the first has enqueued everything before the second begins.
    for (int turn = 0; turn < world.size(); ++turn) {
      if (turn == world.rank()) enqueue_runs(world, ring, announced);
      world.barrier(test_deadline());
    }
    ring.expect_complete();
    return 0;
  });
}

TEST(P2pAhead, ADeviceWaitsForAPeerAsLongAsItsDeadline) {
  const WorldCase p2p = world_cases().front();
  if (!p2p.needs.empty()) GTEST_SKIP() << "needs " << p2p.needs;
  const int failed = p2p.run([](Transport& world) {
    RingAllGather ring(world, 42, 1000);
    const std::vector<Exchange> exchanges{ring.exchange()};
    Exchange exchange = ring.exchange();
    exchange.announced = world.announce(exchanges, test_deadline());
    int found = 0;
    if (world.rank() + 1 < world.size()) {  // the last rank never posts
      world.wait(world.post(std::move(exchange), rank_stream()), rank_stream(), Deadline::after(0.5));
      const Error error = error_of([&] {
        for (const Deadline deadline = test_deadline(); !deadline.expired();) world.progress();
      });
      EXPECT_EQ(error.code(), ErrorCode::kPeer);
      EXPECT_NE(std::string(error.what()).find("ring of 1000 bytes"), std::string::npos) << error.what();
      found = 1;
    }
    // No rank's end may be mistaken for a failure before all have seen theirs.
    world.barrier(test_deadline());
    world.abandon();
    return found;
  });
  int ranks = 0;
  p2p.run([&](Transport& world) {
    ranks = world.size();
    return 0;
  });
  EXPECT_EQ(failed, ranks - 1);
}

}  // namespace
}  // namespace ringattn::testing
