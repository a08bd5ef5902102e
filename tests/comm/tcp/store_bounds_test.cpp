// SPDX-License-Identifier: Apache-2.0
// What the store accepts from any client is bounded, in memory and in time.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "comm/tcp/store_internal.hpp"
#include "tests/comm/tcp/raw_connection.hpp"
#include "tests/comm/tcp/store_connections.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/free_port.hpp"

namespace ringattn {
namespace {

using testing::connect_to;
using testing::error_of;
using testing::free_port;
using testing::has;
using testing::kStoreSlack;
using testing::kStoreTimeout;
using testing::RawConnection;
using testing::Threads;

StoreOptions options_of(int port, int rank) { return {{"127.0.0.1", port}, rank, 2, "job 1", kStoreTimeout}; }

void expect_world(int port, int rank) {
  const std::unique_ptr<Store> store = make_store(options_of(port, rank));
  EXPECT_EQ(store->all_gather("x", Deadline::after(kStoreTimeout)).size(), 2U);
}

// A rank that gathers more than ranks do, or anything else, is named; its bytes are not kept.
TEST(StoreBounds, NamesTheRankThatSendsWhatNobodyMay) {
  const struct {
    WireKind kind;
    std::size_t bytes;
  } cases[] = {{WireKind::kGather, kMaxStoreMessage + 1}, {WireKind::kHello, 10}, {WireKind::kWait, 3}};
  for (const auto& one : cases) {
    const int port = free_port();
    Threads threads;
    threads.run([=] {
      const std::unique_ptr<Store> store = make_store(options_of(port, 0));
      const Error error = error_of([&] { store->barrier(Deadline::after(kStoreTimeout)); });
      EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
      EXPECT_TRUE(has(error, "rank 1 on ")) << error.what();
    });
    Wire rank = connect_to(port);
    const Hello hello = hello_of(options_of(port, 1));
    rank.send(WireKind::kHello, bytes_of(hello));
    for (const Deadline deadline = Deadline::after(kStoreTimeout); !deadline.expired();) {
      pollfd socket = rank.interest();
      poll_briefly({&socket, 1});
      if (!rank.move(max_gathered(2))) break;
      const auto frame = rank.take();
      if (frame && frame->kind == WireKind::kComplete) rank.send(one.kind, std::string(one.bytes, 'x'));
    }
  }
}

// Clients that connect and send nothing delay no rank, however many they are.
TEST(StoreBounds, IsNotHeldUpByMoreStrangersThanItKeeps) {
  const int port = free_port();
  Threads threads;
  threads.run([=] { expect_world(port, 0); });
  const Wire first = connect_to(port);
  std::vector<std::unique_ptr<RawConnection>> strangers;
  for (int i = 0; i < 300; ++i) strangers.push_back(std::make_unique<RawConnection>(port));
  EXPECT_TRUE(strangers.front()->is_closed_within(kStoreSlack));  // one of the oldest
  const Deadline deadline = Deadline::after(kStoreSlack);
  threads.run([=] { expect_world(port, 1); });
  threads.join();
  EXPECT_FALSE(deadline.expired());
}

// What a stranger calls itself stands in a message of rank 0, and is not what a terminal obeys.
TEST(StoreBounds, ShowsNoControlCharactersOfStrangers) {
  EXPECT_EQ(printable("a\x1b[31m\n\x7f"), "a?[31m??");
  EXPECT_EQ(printable(std::string(1000, 'x')).size(), 255U);
}

}  // namespace
}  // namespace ringattn
