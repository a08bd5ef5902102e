// SPDX-License-Identifier: Apache-2.0
// Ranks connect each to each, even if other clients connect to their listening ports.
#include "comm/tcp/connections.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <sstream>

#include "base/host.hpp"
#include "comm/callbacks.hpp"
#include "comm/tcp/tcp.hpp"
#include "comm/tcp/wire.hpp"
#include "comm/threads.hpp"
#include "tests/comm/tcp/raw_connection.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
namespace {

using testing::error_of;
using testing::RawConnection;

constexpr double kLong = 20.0;
constexpr double kSlack = 5.0;

// A world of threads whose ranks see, or change, what is gathered.
class Spy final : public Bootstrap {
 public:
  using Look = std::function<void(std::vector<std::string>&)>;
  Spy(Transport& world, Look look) : world_(world), look_(std::move(look)) {}

  int rank() const override { return world_.rank(); }
  int size() const override { return world_.size(); }
  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    std::vector<std::string> all = world_.all_gather(bytes, deadline);
    look_(all);
    return all;
  }
  void barrier(const Deadline& deadline) override { world_.barrier(deadline); }

 private:
  Transport& world_;
  Look look_;
};

// The port in a rank's "PORT\nADDRESS…"; 0 where a text is none.
int port_in(const std::string& text) {
  std::istringstream lines(text);
  int port = 0;
  std::string address;
  return lines >> port >> address && address == "127.0.0.1" ? port : 0;
}

TEST(Connections, ListensOnTheLoopbackAloneWhereAllRanksAreOneHosts) {
  std::atomic<int> seen{0};
  run_threads_world(3, {}, [&](Transport& world) {
    Spy spy(world, [&](std::vector<std::string>& all) {
      for (const std::string& text : all) seen += port_in(text) > 0 ? 1 : 0;
    });
    const Connections connections = make_connections(spy, "", Timeouts(kLong));
    EXPECT_EQ(connections.hosts, std::vector<std::string>(3, host_name()));
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_EQ(connections.links[static_cast<std::size_t>(rank)].valid(), rank != world.rank());
  });
  EXPECT_EQ(seen, 9);
}

TEST(Connections, TakesNoStrangers) {
  std::mutex mutex;
  std::vector<std::unique_ptr<RawConnection>> strangers;
  run_threads_world(3, {}, [&](Transport& world) {
    Spy spy(world, [&](std::vector<std::string>& all) {
      if (world.rank() != 2) return;
      for (const std::string& text : all) {
        if (const int port = port_in(text); port > 0) {
          // Garbage; a rank of another world; nothing at all.
          const struct {
            std::uint64_t nonce[2];
            std::int32_t from, to;
          } wrong{{1, 2}, 2, 0};
          Wire wire(begin_connection(numeric_address("127.0.0.1", port).at(0)).socket);
          wire.send(WireKind::kPeer, bytes_of(wrong));
          pollfd socket = wire.interest();
          ::poll(&socket, 1, 1000);
          wire.move();
          const std::lock_guard lock(mutex);
          strangers.push_back(std::make_unique<RawConnection>(wire.take_socket()));
          strangers.push_back(std::make_unique<RawConnection>(port));
          strangers.back()->send(std::string(10'000, 'x'));
          strangers.push_back(std::make_unique<RawConnection>(port));
        }
      }
    });
    const std::unique_ptr<Transport> made = make_tcp_transport(spy);
    EXPECT_EQ(made->all_gather(std::string(1, static_cast<char>('a' + made->rank())), Deadline::after(kLong)),
              (std::vector<std::string>{"a", "b", "c"}));
  });
  EXPECT_EQ(strangers.size(), 9U);
  for (const auto& stranger : strangers) EXPECT_TRUE(stranger->is_closed_within(kSlack));
}

// All ranks name two that can't reach each other, in time.
TEST(Connections, NamesRanksThatCanNotConnect) {
  constexpr double kShort = 0.5;
  const Opened other = open_listener(numeric_address("127.0.0.1", 0).at(0));  // takes calls, says nothing
  const int port = local_address(other.socket).port();
  run_threads_world(3, {}, [&](Transport& world) {
    Spy spy(world, [&](std::vector<std::string>& all) {
      if (port_in(all[0]) > 0 && world.rank() == 2) all[0] = std::to_string(port) + "\n127.0.0.1";
    });
    const auto start = Deadline::Clock::now();
    TcpOptions options;
    options.setup_seconds = kShort;
    const Error error = error_of([&] { make_tcp_transport(spy, options); });
    EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
    EXPECT_NE(std::string(error.what()).find("and rank 2 on"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("did not connect within 0.5 s"), std::string::npos) << error.what();
    EXPECT_LT(std::chrono::duration<double>(Deadline::Clock::now() - start).count(), kShort + kSlack);
  });
}

TEST(Callbacks, AreCheckedBeforeTheyAreTrusted) {
  const auto gather_of = [](std::vector<std::string> all) {
    Callbacks callbacks;
    callbacks.rank = 1;
    callbacks.size = 2;
    callbacks.all_gather = [all = std::move(all)](std::string_view, double) { return all; };
    const auto world = make_callback_bootstrap(std::move(callbacks));
    return error_of([&] { world->all_gather("mine", Deadline::after(1.0)); });
  };
  EXPECT_EQ(gather_of({"mine"}).code(), ErrorCode::kUsage);
  EXPECT_EQ(gather_of({"mine", "theirs"}).code(), ErrorCode::kUsage);
  EXPECT_EQ(gather_of({"theirs", "mine", "more"}).code(), ErrorCode::kUsage);

  Callbacks callbacks;
  EXPECT_EQ(error_of([&] { make_callback_bootstrap(callbacks); }).code(), ErrorCode::kUsage);
  callbacks.all_gather = [](std::string_view, double) -> std::vector<std::string> {
    throw std::runtime_error("the group is gone");
  };
  for (const auto& [rank, size] : {std::pair(0, 0), {2, 2}, {-1, 1}}) {
    callbacks.rank = rank;
    callbacks.size = size;
    EXPECT_EQ(error_of([&] { make_callback_bootstrap(callbacks); }).code(), ErrorCode::kUsage);
  }
  callbacks.rank = 0;
  callbacks.size = 1;
  const Error thrown =
      error_of([&] { make_callback_bootstrap(callbacks)->barrier(Deadline::after(1.0)); });  // by all_gather
  EXPECT_EQ(thrown.code(), ErrorCode::kPeer);
  EXPECT_NE(std::string(thrown.what()).find("the group is gone"), std::string::npos) << thrown.what();
  double given = 0.0;
  callbacks.barrier = [&given](double seconds) { given = seconds; };
  make_callback_bootstrap(callbacks)->barrier(Deadline::after(7.0));
  EXPECT_GT(given, 1.0);
  EXPECT_LE(given, 7.0);
}

// As ringattn.h says of its callbacks, which have no barrier.
TEST(Callbacks, RanksComeTogetherByAllGatherAlone) {
  run_threads_world(3, {}, [](Transport& threads) {
    Callbacks callbacks;
    callbacks.rank = threads.rank();
    callbacks.size = threads.size();
    callbacks.all_gather = [&threads](std::string_view bytes, double seconds) {
      return threads.all_gather(bytes, Deadline::after(seconds));
    };
    callbacks.barrier = [](double) { ADD_FAILURE() << "a barrier"; };
    const auto world = make_tcp_transport(*make_callback_bootstrap(std::move(callbacks)));
    world->barrier(Deadline::after(kLong));
  });
}

}  // namespace
}  // namespace ringattn
