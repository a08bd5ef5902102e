// SPDX-License-Identifier: Apache-2.0
// Who comes to the store, who is refused, who is named for not coming, and how long all of that may take.
#include "comm/tcp/store.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "comm/tcp/store_internal.hpp"
#include "tests/comm/tcp/raw_connection.hpp"
#include "tests/comm/tcp/store_connections.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/free_port.hpp"

namespace ringattn {
namespace {

using testing::error_of;
using testing::free_port;
using testing::has;
using testing::kStoreSlack;
using testing::kStoreTimeout;
using testing::RawConnection;
using testing::Threads;

double seconds_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

StoreOptions options_of(int port, int rank, int size, double seconds = kStoreTimeout, std::string job = "job 1") {
  return {{"127.0.0.1", port}, rank, size, std::move(job), seconds};
}

// The world comes together, and its ranks gather.
void expect_world(int port, int rank, int size) {
  const std::unique_ptr<Store> store = make_store(options_of(port, rank, size));
  EXPECT_EQ(store->rank(), rank);
  EXPECT_EQ(store->size(), size);
  EXPECT_EQ(store->hosts().size(), static_cast<std::size_t>(size));
  const std::vector<std::string> all =
      store->all_gather(std::string(static_cast<std::size_t>(rank) * 1000, 'x'), Deadline::after(kStoreTimeout));
  ASSERT_EQ(all.size(), static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], std::string(i * 1000, 'x'));
  store->barrier(Deadline::after(kStoreTimeout));
}

// Waits until a server listens there.
void wait_for_server(int port) {
  for (const Deadline deadline = Deadline::after(kStoreTimeout); !deadline.expired();) {
    if (RawConnection(port).is_there()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  FAIL() << "nobody listens";
}

// A connection whose rank has introduced itself.
Wire say_hello(int port, const StoreOptions& options) {
  Wire wire(begin_connection(numeric_address("127.0.0.1", port).at(0)).socket);
  const Hello hello = hello_of(options);
  wire.send(WireKind::kHello, bytes_of(hello));
  for (const Deadline deadline = Deadline::after(kStoreTimeout); !wire.all_sent() && !deadline.expired();) {
    pollfd socket = wire.interest();
    poll_briefly({&socket, 1});
    wire.move();
  }
  return wire;
}

TEST(StoreAddress, IsAHostAndAPort) {
  const auto text_of = [](std::string_view text) {
    const auto address = parse_store_address(text);
    return address ? fmt::format("{} {}", address->host, address->port) : std::string("none");
  };
  EXPECT_EQ(text_of("node1:29555"), "node1 29555");
  EXPECT_EQ(text_of("10.0.0.7:1"), "10.0.0.7 1");
  EXPECT_EQ(text_of("[::1]:65535"), "::1 65535");
  EXPECT_EQ(parse_store_address("[::1]:80")->text(), "[::1]:80");
  EXPECT_EQ(parse_store_address("a:80")->text(), "a:80");
  for (const char* bad :
       {"", ":", "node1", "node1:", ":29555", "node1:0", "node1:65536", "node1:-1", "node1:2x", "node1: 2",
        "node1:99999999999999999999", "::1:80", "[::1:80", "::1]:80", "[]:80", "a b:80", "a\n:80"}) {
    EXPECT_EQ(text_of(bad), "none") << bad;
  }
  EXPECT_EQ(text_of(std::string(300, 'a') + ":80"), "none");
}

TEST(Store, JoinsItsRanks) {
  for (const int size : {1, 2, 5}) {
    const int port = free_port();
    Threads threads;
    for (int rank = 0; rank < size; ++rank) threads.run([=] { expect_world(port, rank, size); });
  }
}

TEST(Store, ServesNamesToo) {
  const int port = free_port();
  Threads threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.run([=] {
      StoreOptions options = options_of(port, rank, 2);
      options.address.host = "localhost";
      EXPECT_EQ(make_store(options)->all_gather("x", Deadline::after(kStoreTimeout)).size(), 2U);
    });
  }
}

TEST(Store, RefusesWhatIsNoTime) {
  for (const int rank : {0, 1}) {
    const StoreOptions options = options_of(free_port(), rank, 2, std::nan(""));
    EXPECT_EQ(error_of([&] { make_store(options); }).code(), ErrorCode::kUsage) << rank;
  }
}

// All that have come leave with the same error, and know that rank 0 prints it.
TEST(Store, NamesTheRankThatNeverComes) {
  constexpr double kShort = 0.5;
  const int port = free_port();
  const auto start = Deadline::Clock::now();
  Threads threads;
  for (const int rank : {0, 1, 3}) {
    threads.run([=] {
      // Rank 0's time counts.
      const Error error = error_of([&] { make_store(options_of(port, rank, 4, rank == 0 ? kShort : kStoreTimeout)); });
      EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
      EXPECT_TRUE(has(error, "rank 2 did not come to the store at 127.0.0.1")) << error.what();
      EXPECT_TRUE(has(error, "3 of 4 ranks came")) << error.what();
      ASSERT_NE(error.location(), nullptr);
      EXPECT_EQ(error.location()->rank, 0);
      EXPECT_GE(seconds_since(start), kShort);
      EXPECT_LT(seconds_since(start), kShort + kStoreSlack);
    });
  }
}

TEST(Store, NamesTheAddressThatNobodyServes) {
  constexpr double kShort = 0.5;
  const auto start = Deadline::Clock::now();
  const Error error = error_of([&] { make_store(options_of(free_port(), 1, 2, kShort)); });
  EXPECT_EQ(error.code(), ErrorCode::kPeer);
  EXPECT_TRUE(has(error, "rank 1 can't reach rank 0's store at 127.0.0.1:")) << error.what();
  EXPECT_TRUE(has(error, "Connection refused")) << error.what();
  EXPECT_GE(seconds_since(start), kShort);
  EXPECT_LT(seconds_since(start), kShort + kStoreSlack);
}

// Who is refused knows at once. The others wait for the right one, and get it.
TEST(Store, RefusesWhoDoesNotBelongToTheJob) {
  const int port = free_port();
  Threads threads;
  threads.run([=] { expect_world(port, 0, 3); });
  threads.run([=] { expect_world(port, 1, 3); });
  wait_for_server(port);
  struct Case {
    StoreOptions options;
    const char* why;
  };
  const Case cases[] = {
      // It is told what is wrong with what it said, and nothing of the job.
      {options_of(port, 2, 3, kStoreTimeout, "job 2"), "(the store serves another job than job job 2)"},
      {options_of(port, 2, 3, kStoreTimeout, ""), "(the store serves another job than a job without a name)"},
      {options_of(port, 2, 4), "(the store's world has not 4 ranks)"},
      {options_of(port, 1, 2), "(the store's world has not 2 ranks)"},
  };
  const auto expect_refused = [](const StoreOptions& options, const char* why) {
    const auto start = Deadline::Clock::now();
    const Error error = error_of([&] { make_store(options); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
    EXPECT_TRUE(has(error, why)) << error.what();
    EXPECT_LT(seconds_since(start), kStoreSlack);
  };
  for (const Case& one : cases) expect_refused(one.options, one.why);
  threads.run([=] { expect_world(port, 2, 3); });
}

TEST(Store, RefusesARankThatIsThere) {
  constexpr double kShort = 2.0;
  const int port = free_port();
  Threads threads;
  std::atomic<int> refused{0};
  std::atomic<int> waited{0};
  threads.run([&, port] {
    const Error error = error_of([&] { make_store(options_of(port, 0, 3, kShort)); });
    EXPECT_TRUE(has(error, "rank 2 did not come")) << error.what();
    EXPECT_TRUE(has(error, "a rank 1 on ")) << error.what();
    EXPECT_TRUE(has(error, "is there already")) << error.what();
  });
  // Rank 0 is.
  wait_for_server(port);
  Wire second = say_hello(port, options_of(port, 0, 3));
  std::optional<WireFrame> answer;
  for (const Deadline deadline = Deadline::after(kShort + kStoreSlack); !answer && !deadline.expired();) {
    pollfd socket = second.interest();
    poll_briefly({&socket, 1});
    if (!second.move()) break;
    answer = second.take();
  }
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->kind, WireKind::kFailed);
  EXPECT_TRUE(has(unpack_error(answer->body), "serves the store")) << unpack_error(answer->body).what();
  for (int i = 0; i < 2; ++i) {  // one of them is first
    threads.run([&, port] {
      const Error error = error_of([&] { make_store(options_of(port, 1, 3)); });
      ++(error.code() == ErrorCode::kUsage ? refused : waited);
      EXPECT_TRUE(error.code() == ErrorCode::kPeer || has(error, "a rank 1 is there already")) << error.what();
    });
  }
  while (refused + waited < 2) std::this_thread::yield();
  EXPECT_EQ(refused, 1);
}

TEST(Store, SaysThatItsPortIsInUse) {
  const Opened other = open_listener(numeric_address("127.0.0.1", 0).at(0));
  ASSERT_TRUE(other.socket.valid());
  const int port = local_address(other.socket).port();
  const auto start = Deadline::Clock::now();
  const Error error = error_of([&] { make_store(options_of(port, 0, 2)); });
  EXPECT_EQ(error.code(), ErrorCode::kUsage);
  EXPECT_TRUE(has(error, fmt::format("rank 0 can't serve the store at 127.0.0.1:{}", port))) << error.what();
  EXPECT_TRUE(has(error, "Address already in use")) << error.what();
  EXPECT_LT(seconds_since(start), kStoreSlack);
}

TEST(Store, SaysThatTheAddressIsNotItsHosts) {
  StoreOptions options = options_of(free_port(), 0, 2);
  options.address.host = "203.0.113.77";  // reserved for documentation: no host has it
  EXPECT_EQ(error_of([&] { make_store(options); }).code(), ErrorCode::kUsage);
  options.address.host = "no..name";  // no name server has to be asked
  EXPECT_EQ(error_of([&] { make_store(options); }).code(), ErrorCode::kUsage);
}

// A rank that comes to the port of something else is told at once.
TEST(Store, IsToldFromOtherServices) {
  const Opened other = open_listener(numeric_address("127.0.0.1", 0).at(0));
  const int port = local_address(other.socket).port();
  Threads threads;
  threads.run([&] {
    for (const Deadline deadline = Deadline::after(kStoreTimeout); !deadline.expired();) {
      pollfd socket{other.socket.get(), POLLIN, 0};
      ::poll(&socket, 1, 100);
      Opened opened = accept_connection(other.socket);
      if (!opened.socket.valid()) continue;
      RawConnection(std::move(opened.socket)).send("HTTP/1.1 400 Bad Request\r\n\r\n");
      return;
    }
  });
  const auto start = Deadline::Clock::now();
  const Error error = error_of([&] { make_store(options_of(port, 1, 2)); });
  EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
  EXPECT_TRUE(has(error, "is not a ringattn store")) << error.what();
  EXPECT_LT(seconds_since(start), kStoreSlack);
}

// Whatever strangers send, or don't, their connections end and the world comes together.
TEST(Store, PassesStrangersOver) {
  const int port = free_port();
  Threads threads;
  threads.run([=] { expect_world(port, 0, 2); });
  wait_for_server(port);
  const Hello hello = hello_of(options_of(port, 1, 2));
  const auto frame = [](std::uint32_t version, std::uint32_t kind, std::uint64_t bytes, std::string_view body) {
    std::string text = "ringattn";
    text += bytes_of(version);
    text += bytes_of(kind);
    text += bytes_of(bytes);
    return text + std::string(body);
  };
  const std::string bad[] = {
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
      std::string(100'000, '\0'),
      std::string(100'000, '\xff'),
      frame(99, 1, sizeof hello, bytes_of(hello)),           // another version
      frame(1, 77, sizeof hello, bytes_of(hello)),           // an unknown kind
      frame(1, 4, 3, "abc"),                                 // not a greeting
      frame(1, 1, 1, "x"),                                   // a short one
      frame(1, 1, ~std::uint64_t{0}, bytes_of(hello)),       // sizes beyond all bounds
      frame(1, 1, std::uint64_t{1} << 32, bytes_of(hello)),  // the same
  };
  for (const std::string& bytes : bad) {
    const RawConnection stranger(port);
    stranger.send(bytes);
    EXPECT_TRUE(stranger.is_closed_within(kStoreSlack)) << bytes.substr(0, 40);
  }
  // Ranks that are none.
  for (const int rank : {-1, 2, 1 << 30}) {
    Hello wrong = hello;
    wrong.rank = rank;
    const RawConnection stranger(port);
    stranger.send(frame(1, 1, sizeof wrong, bytes_of(wrong)));
    EXPECT_TRUE(stranger.is_closed_within(kStoreSlack)) << rank;
  }
  const RawConnection silent(port);
  const RawConnection halting(port);
  halting.send(frame(1, 1, sizeof hello, bytes_of(hello)).substr(0, 40));
  threads.run([=] { expect_world(port, 1, 2); });
}

// A rank that ends before all are there may be started again.
TEST(Store, TakesARankBackThatHasLeft) {
  const int port = free_port();
  Threads threads;
  threads.run([=] { expect_world(port, 0, 3); });
  wait_for_server(port);
  say_hello(port, options_of(port, 1, 3));  // and the connection ends
  threads.run([=] { expect_world(port, 1, 3); });
  threads.run([=] { expect_world(port, 2, 3); });
}

// A job that begins while another one runs may have the same port.
TEST(Store, FreesItsPortOnceAllHaveCome) {
  const int port = free_port();
  std::vector<std::unique_ptr<Store>> first(2);
  {
    Threads threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.run([&, port, rank] { first[static_cast<std::size_t>(rank)] = make_store(options_of(port, rank, 2)); });
    }
  }
  Threads threads;
  for (int rank = 0; rank < 3; ++rank) threads.run([=] { expect_world(port, rank, 3); });
  for (const auto& store : first) {
    threads.run([&store] { EXPECT_EQ(store->all_gather("x", Deadline::after(kStoreTimeout)).size(), 2U); });
  }
}

// Once all have come, one that leaves is named to all.
TEST(Store, NamesTheRankThatLeavesACollective) {
  const int port = free_port();
  Threads threads;
  threads.run([=] { make_store(options_of(port, 2, 3)); });  // leaves at once
  for (const int rank : {0, 1}) {
    threads.run([=] {
      const auto start = Deadline::Clock::now();
      const std::unique_ptr<Store> store = make_store(options_of(port, rank, 3));
      const Error error = error_of([&] { store->all_gather("x", Deadline::after(kStoreTimeout)); });
      EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
      EXPECT_TRUE(has(error, "rank 2 on ")) << error.what();
      EXPECT_LT(seconds_since(start), kStoreSlack);
    });
  }
}

// The rank whose deadline expires first ends the wait of all, so only rank 0 has to report it.
TEST(Store, EndsACollectiveForAllWhenTheFirstRanksTimeIsOver) {
  constexpr double kShort = 0.3;
  const int port = free_port();
  std::atomic<int> done{0};
  Threads threads;
  threads.run([&, port] {
    const std::unique_ptr<Store> store = make_store(options_of(port, 2, 3));
    while (done < 2) std::this_thread::yield();
  });
  for (const int rank : {0, 1}) {
    threads.run([&, port, rank] {
      const auto start = Deadline::Clock::now();
      const std::unique_ptr<Store> store = make_store(options_of(port, rank, 3));
      const Error error = error_of([&] { store->barrier(Deadline::after(rank == 1 ? kShort : kStoreTimeout)); });
      ++done;
      EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
      EXPECT_TRUE(has(error, "did not finish within 0.3 s (rank 0 on ")) << error.what();
      ASSERT_NE(error.location(), nullptr);
      EXPECT_EQ(error.location()->rank, 0);
      EXPECT_LT(seconds_since(start), kStoreSlack);
    });
  }
}

TEST(Store, NamesTheRankThatMissesACollective) {
  constexpr double kShort = 0.3;
  const int port = free_port();
  std::atomic<int> done{0};
  Threads threads;
  threads.run([&, port] {
    const std::unique_ptr<Store> store = make_store(options_of(port, 2, 3));
    while (done < 2) std::this_thread::yield();
  });
  for (const int rank : {0, 1}) {
    threads.run([&, port, rank] {
      const std::unique_ptr<Store> store = make_store(options_of(port, rank, 3));
      const Error error = error_of([&] { store->barrier(Deadline::after(kShort)); });
      ++done;
      EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
      EXPECT_TRUE(has(error, "barrier did not finish within 0.3 s (rank 0 on ")) << error.what();
      EXPECT_TRUE(has(error, "waits for rank 2 on ")) << error.what();
    });
  }
}

TEST(Store, ChecksWhatItIsGiven) {
  for (const auto& [rank, size] : {std::pair(0, 0), {-1, 2}, {2, 2}, {0, kMaxStoreRanks + 1}}) {
    EXPECT_EQ(error_of([&, rank = rank, size = size] { make_store(options_of(1, rank, size)); }).code(),
              ErrorCode::kUsage);
  }
  EXPECT_EQ(error_of([] { make_store(options_of(1, 0, 2, kStoreTimeout, std::string(128, 'x'))); }).code(),
            ErrorCode::kUsage);
}

}  // namespace
}  // namespace ringattn
