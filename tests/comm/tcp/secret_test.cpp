// SPDX-License-Identifier: Apache-2.0
// Ranks with a secret form a world. A client that doesn't know it, replays messages or changes them is shut out.
#include "comm/tcp/secret.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <mutex>

#include "comm/tcp/handshake.hpp"
#include "comm/tcp/store_internal.hpp"
#include "comm/tcp/tcp.hpp"
#include "comm/threads.hpp"
#include "tests/comm/tcp/raw_connection.hpp"
#include "tests/comm/tcp/store_connections.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/free_port.hpp"

namespace ringattn {
namespace {

using testing::bytes_with;
using testing::connect_to;
using testing::error_of;
using testing::free_port;
using testing::has;
using testing::kStoreSlack;
using testing::kStoreTimeout;
using testing::next_frame;
using testing::plain_frame;
using testing::RawConnection;
using testing::send_raw;
using testing::Threads;

constexpr double kShort = 1.0;

const std::string kText(64, 's');
const std::string kOther(64, 'o');

Secret secret_of(const std::string& text) { return {text, "the test"}; }

class WithSecret : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_mac()) GTEST_SKIP() << "this build has no crypto library";
  }
};
using StoreWithSecret = WithSecret;
using ConnectionsWithSecret = WithSecret;

StoreOptions options_of(int port, int rank, int size, std::optional<Secret> secret, double seconds = kStoreTimeout) {
  return {{"127.0.0.1", port}, rank, size, "a job that nobody is told of", seconds, std::move(secret)};
}

void expect_world(const StoreOptions& options) {
  const std::unique_ptr<Store> store = make_store(options);
  EXPECT_EQ(store->all_gather(std::to_string(options.rank), Deadline::after(kStoreTimeout)).size(),
            static_cast<std::size_t>(options.size));
  EXPECT_EQ(store->session().size(), 64U);
  TcpOptions tcp;
  tcp.secret = options.secret;
  const std::unique_ptr<Transport> world = make_tcp_transport(*store, tcp);
  world->barrier(Deadline::after(kStoreTimeout));
}

TEST_F(StoreWithSecret, JoinsRanksThatKnowIt) {
  const int port = free_port();
  Threads threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.run([=] { expect_world(options_of(port, rank, 3, secret_of(kText))); });
  }
}

// Both sides name who has which.
TEST_F(StoreWithSecret, NamesRanksWhoseSecretIsAnotherOrMissing) {
  const struct {
    std::optional<Secret> first, second;
    const char* says_first;
    const char* says_second;
  } cases[] = {
      {secret_of(kText), secret_of(kOther), "a rank 1 has another secret than rank 0",
       "rank 1 and rank 0, at 127.0.0.1:"},
      {secret_of(kText), Secret(), "a rank 1 has no secret, and rank 0 has one", "asks for a secret (rank 1 has none)"},
      {Secret(), secret_of(kText), "a rank 1 has a secret, and rank 0 has none", "(the server there has none)"},
  };
  for (const auto& one : cases) {
    const int port = free_port();
    Threads threads;
    threads.run([&one, port] {
      const Error error = error_of([&] { make_store(options_of(port, 0, 2, one.first, kShort)); });
      EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
      EXPECT_TRUE(has(error, "rank 1 did not come to the store")) << error.what();
      EXPECT_TRUE(has(error, one.says_first)) << error.what() << " and not " << one.says_first;
    });
    const Error error = error_of([&] { make_store(options_of(port, 1, 2, one.second)); });
    EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
    EXPECT_TRUE(has(error, one.says_second)) << error.what();
    EXPECT_FALSE(has(error, "nobody is told of")) << error.what();
  }
}

// The right rank still joins.
TEST_F(StoreWithSecret, ShutsOutWhoDoesNotKnowItAndTellsNothing) {
  const int port = free_port();
  Threads threads;
  threads.run([=] { expect_world(options_of(port, 0, 2, secret_of(kText))); });
  const Hello hello = hello_of(options_of(port, 1, 2, Secret()));
  const Introduction introduction = introduce(Purpose::kStore, 1, 0, 2);
  const std::string openings[] = {
      plain_frame(WireKind::kHello, bytes_of(hello)),
      plain_frame(WireKind::kIntroduction, bytes_of(introduction)) + plain_frame(WireKind::kHello, bytes_of(hello)),
      plain_frame(WireKind::kIntroduction, bytes_of(introduction)) +
          plain_frame(WireKind::kHello, std::string(bytes_of(hello)) + std::string(sizeof(Mac), 'x')),
      plain_frame(WireKind::kIntroduction, bytes_of(introduction)) +
          plain_frame(WireKind::kIntroduction, bytes_of(introduction)),
      plain_frame(WireKind::kIntroduction, "short"),
      plain_frame(WireKind::kGather, "x"),
      plain_frame(WireKind::kProof, "x"),
  };
  for (const std::string& bytes : openings) {
    const Wire wire = connect_to(port);
    send_raw(wire, bytes);
    std::string heard;
    for (const Deadline deadline = Deadline::after(kStoreSlack); !deadline.expired();) {
      pollfd socket{wire.socket().get(), POLLIN, 0};
      ::poll(&socket, 1, 20);
      char some[4096];
      const ssize_t got = ::recv(wire.socket().get(), some, sizeof some, 0);
      if (got == 0 || (got < 0 && errno != EAGAIN)) break;
      if (got > 0) heard.append(some, static_cast<std::size_t>(got));
      ASSERT_FALSE(deadline.overdue() > -0.1) << "it stays connected";
    }
    EXPECT_EQ(heard.find("nobody is told of"), std::string::npos);
  }
  threads.run([=] { expect_world(options_of(port, 1, 2, secret_of(kText))); });
}

// A whole session that was recorded is worth nothing.
TEST_F(StoreWithSecret, TakesNoReplay) {
  const int port = free_port();
  Threads threads;
  threads.run([=] { expect_world(options_of(port, 0, 3, secret_of(kText))); });
  const Hello hello = hello_of(options_of(port, 1, 3, Secret()));
  const Introduction introduction = introduce(Purpose::kStore, 1, 0, 3);
  std::string recorded = plain_frame(WireKind::kIntroduction, bytes_of(introduction));
  {
    Wire wire = connect_to(port);
    send_raw(wire, recorded);
    const auto frame = next_frame(wire);
    ASSERT_TRUE(frame);
    const auto proof = value_of<Proof>(frame->body);
    ASSERT_TRUE(proof);
    const auto keys = check_proof(secret_of(kText), introduction, *proof, {});
    ASSERT_TRUE(keys);
    const std::string joins = bytes_with(*keys, WireKind::kHello, bytes_of(hello));
    send_raw(wire, joins);
    recorded += joins;
    const RawConnection joined(wire.take_socket());
    EXPECT_FALSE(joined.is_closed_within(0.3));  // it counts once
  }
  const RawConnection replayed(connect_to(port).take_socket());
  replayed.send(recorded);
  EXPECT_TRUE(replayed.is_closed_within(kStoreSlack));
  for (const int rank : {1, 2}) {
    threads.run([=] { expect_world(options_of(port, rank, 3, secret_of(kText))); });
  }
}

// Who answers at the store's address without knowing the secret hears nothing of the job.
TEST_F(StoreWithSecret, TellsAStrangerThatServesItsAddressNothing) {
  const Opened listener = open_listener(numeric_address("127.0.0.1", 0).at(0));
  const int port = local_address(listener.socket).port();
  Threads threads;
  threads.run([&] {
    for (const Deadline deadline = Deadline::after(kStoreTimeout); !deadline.expired();) {
      pollfd socket{listener.socket.get(), POLLIN, 0};
      ::poll(&socket, 1, 100);
      Opened opened = accept_connection(listener.socket);
      if (!opened.socket.valid()) continue;
      Wire wire(std::move(opened.socket));
      const auto first = next_frame(wire);
      ASSERT_TRUE(first);
      EXPECT_EQ(first->kind, WireKind::kIntroduction);
      const auto introduction = value_of<Introduction>(first->body);
      ASSERT_TRUE(introduction);
      wire.send(WireKind::kProof, bytes_of(answer_introduction(secret_of(kOther), *introduction, {}).proof));
      wire.move();
      const auto second = next_frame(wire);
      ASSERT_TRUE(second);
      EXPECT_EQ(second->kind, WireKind::kMismatch);
      EXPECT_EQ(second->body, "");
      return;
    }
  });
  EXPECT_EQ(error_of([&] { make_store(options_of(port, 1, 2, secret_of(kText))); }).code(), ErrorCode::kPeer);
}

// Once, on rank 0, and only where other hosts reach the port.
TEST_F(StoreWithSecret, WarnsWhereAnybodyMayJoin) {
  const auto warnings_of = [](const char* host, const Secret& secret) {
    const int port = free_port();
    std::mutex mutex;
    std::vector<std::string> warnings;
    Threads threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.run([&, rank, port] {
        StoreOptions options = options_of(port, rank, 2, secret);
        if (rank == 0) options.address.host = host;
        options.warn = [&](const MessageTemplate& warning) {
          const std::lock_guard lock(mutex);
          warnings.push_back(warning.text());
        };
        make_store(options);
      });
    }
    threads.join();
    EXPECT_LE(warnings.size(), 1U);
    const bool names = !warnings.empty() && warnings[0].find(fmt::format("{}:{}", host, port)) != std::string::npos;
    return std::pair(warnings.size(), names);
  };
  EXPECT_EQ(warnings_of("127.0.0.1", Secret()), std::pair(std::size_t{0}, false));
  EXPECT_EQ(warnings_of("0.0.0.0", Secret()), std::pair(std::size_t{1}, true));
  EXPECT_EQ(warnings_of("0.0.0.0", secret_of(kText)), std::pair(std::size_t{0}, false));
}

// The ranks of a caller's own group, where a secret is set on some hosts only.
TEST_F(ConnectionsWithSecret, NamesRanksWithoutOne) {
  run_threads_world(3, {}, [](Transport& world) {
    TcpOptions options;
    options.secret = world.rank() == 1 ? Secret() : secret_of(kText);
    const Error error = error_of([&] { make_tcp_transport(world, options); });
    EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
    EXPECT_TRUE(has(error, "rank 1 on ")) << error.what();
    EXPECT_TRUE(has(error, "has no secret (the other 2 of 3 ranks have one)")) << error.what();
  });
}

TEST_F(ConnectionsWithSecret, DoesNotConnectRanksWithDifferentOnes) {
  run_threads_world(2, {}, [](Transport& world) {
    TcpOptions options;
    options.setup_seconds = 0.5;
    options.secret = secret_of(world.rank() == 1 ? kText : kOther);
    const Error error = error_of([&] { make_tcp_transport(world, options); });
    EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
    EXPECT_TRUE(has(error, "did not connect within 0.5 s")) << error.what();
  });
}

}  // namespace
}  // namespace ringattn
