// SPDX-License-Identifier: Apache-2.0
// What every transport must do while all goes well, whatever moves its bytes. Runs in each world of world_cases().
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "base/host.hpp"
#include "tests/comm/exchanges.hpp"
#include "tests/comm/world_cases.hpp"

namespace ringattn::testing {
namespace {

class Conformance : public ::testing::TestWithParam<WorldCase> {
 protected:
  void SetUp() override {
    if (!GetParam().needs.empty()) GTEST_SKIP() << "needs " << GetParam().needs;
  }

  int run(const std::function<void(Transport&)>& rank_main) {
    return GetParam().run([&](Transport& world) {
      rank_main(world);
      return 0;
    });
  }
};

TEST_P(Conformance, KnowsItsRanks) {
  int size = 0;
  const int sum = GetParam().run([&](Transport& world) {
    EXPECT_GE(world.rank(), 0);
    EXPECT_LT(world.rank(), world.size());
    EXPECT_EQ(world.memory(), GetParam().memory);
    EXPECT_EQ(world.host().memory(), MemoryKind::kHost);
    EXPECT_EQ(world.host().rank(), world.rank());
    EXPECT_EQ(world.host().size(), world.size());
    EXPECT_FALSE(world.name().empty());
    if (world.rank() == 0) size = world.size();
    return (world.rank() + 1) * 1000 - world.size();
  });
  if (size > 0) {
    EXPECT_EQ(sum, size * (size + 1) / 2 * 1000 - size * size);
  }
}

TEST_P(Conformance, HandsOnAroundTheRing) {
  run([](Transport& world) {
    std::uint32_t seed = 1;
    for (const std::size_t bytes : {0, 1, 7, 1000, 4096, 100'003}) {
      if (bytes > 50'000 && world.size() > 8) continue;  // MovesLargeMessages has as many
      expect_ring(world, seed++, bytes);
    }
  });
}

TEST_P(Conformance, MovesLargeMessages) {
  run([](Transport& world) { expect_ring(world, 3, world.size() > 8 ? 50'003 : 1'000'003); });
}

TEST_P(Conformance, MovesEveryoneToEveryone) {
  run([](Transport& world) {
    RandomExchange all(world, 5, 1.0);
    world.wait(world.post(all.exchange, rank_stream()), rank_stream(), test_deadline());
    all.expect_complete(world.rank());
  });
}

TEST_P(Conformance, KeepsRandomExchangesApart) {
  run([](Transport& world) {
    const std::uint32_t exchanges = world.size() > 8 ? 6 : 40;
    const double density = world.size() > 8 ? 0.05 : 0.5;
    constexpr std::size_t kInFlight = 5;
    std::vector<std::pair<Ticket, std::unique_ptr<RandomExchange>>> flying;
    const auto land = [&] {
      world.wait(flying.front().first, rank_stream(), test_deadline());
      flying.front().second->expect_complete(world.rank());
      flying.erase(flying.begin());
    };
    for (std::uint32_t seed = 100; seed < 100 + exchanges; ++seed) {
      auto next = std::make_unique<RandomExchange>(world, seed, density);
      const Ticket ticket = world.post(next->exchange, rank_stream());
      flying.emplace_back(ticket, std::move(next));
      if (seed % 3 == 0) world.progress();
      if (flying.size() == kInFlight) land();
    }
    while (!flying.empty()) land();
  });
}

TEST_P(Conformance, MovesManySpans) {
  run([](Transport& world) {
    const int next = (world.rank() + 1) % world.size();
    const int previous = (world.rank() - 1 + world.size()) % world.size();
    if (world.size() == 1) return;
    constexpr std::size_t kSpans = 500;
    const Memory source(world, payload_of(9, world.rank(), kSpans * 20));
    const Memory target(world, Bytes(kSpans * 20, kUntouched));
    Exchange exchange;
    exchange.sends.push_back({next, 0, {}});
    exchange.receives.push_back({previous, 0, {}});
    // Sent in order, received from the back: spans are pieces of a message, not of memory.
    for (std::size_t i = 0; i < kSpans; ++i) {
      exchange.sends[0].spans.push_back({source.data() + i * 20, i % 20});
      exchange.receives[0].spans.push_back({target.data() + (kSpans - 1 - i) * 20, i % 20});
    }
    world.wait(world.post(exchange, rank_stream()), rank_stream(), test_deadline());
    const Bytes theirs = payload_of(9, previous, kSpans * 20);
    const Bytes found = target.read();
    for (std::size_t i = 0; i < kSpans; ++i) {
      const std::byte* span = found.data() + (kSpans - 1 - i) * 20;
      EXPECT_TRUE(std::equal(span, span + i % 20, theirs.data() + i * 20)) << "span " << i;
      EXPECT_TRUE(std::all_of(span + i % 20, span + 20, [](std::byte b) { return b == kUntouched; })) << "span " << i;
    }
  });
}

TEST_P(Conformance, KeepsSeveralExchangesInFlight) {
  run([](Transport& world) {
    std::vector<RingAllGather> rings;
    std::vector<Ticket> tickets;
    rings.reserve(6);
    for (std::uint32_t i = 0; i < 6; ++i) {
      rings.emplace_back(world, i, (6 - i) * 777);
      tickets.push_back(world.post(rings.back().exchange(), rank_stream()));
    }
    for (std::size_t i = 0; i < rings.size(); ++i) {
      world.wait(tickets[i], rank_stream(), test_deadline());
      rings[i].expect_complete();
    }
  });
}

// As an SSM layer does with its convolution: tokens go around on the rank's stream, and meanwhile states of two ranges
// go from rank to rank on another one, each handed on after its arrival. All ranks post in one order, whichever stream
// an exchange belongs to.
TEST_P(Conformance, TakesExchangesOfTwoStreamsInTheOrderOfTheCalls) {
  run([](Transport& world) {
    constexpr std::uint32_t kLayers = 3, kRanges = 2;
    const std::size_t bytes = 70'001;
    const int rank = world.rank();
    const SideStream side(world);
    std::vector<RingAllGather> rings;
    std::vector<Memory> states;  // [layers, ranges]
    rings.reserve(kLayers);
    for (std::uint32_t i = 0; i < kLayers; ++i) rings.emplace_back(world, 60 + i, 3001);
    for (std::uint32_t i = 0; i < kLayers * kRanges; ++i) {
      states.emplace_back(world, rank == 0 ? payload_of(70 + i, 0, bytes) : Bytes(bytes, kUntouched));
    }
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      world.wait(world.post(rings[layer].exchange(), rank_stream()), rank_stream(), test_deadline());
      for (std::uint32_t range = 0; range < kRanges; ++range) {
        const Memory& state = states[layer * kRanges + range];
        std::vector<Ticket> tickets;
        for (int hop = 0; hop + 1 < world.size(); ++hop) {
          Exchange exchange;
          exchange.label = fmt::format("states of range {}, hop {}", range, hop);
          if (rank == hop) exchange.sends.push_back({hop + 1, 0, {{state.data(), bytes}}});
          if (rank == hop + 1) exchange.receives.push_back({hop, 0, {{state.data(), bytes}}});
          tickets.push_back(world.post(std::move(exchange), side.get()));
          if (rank != hop + 1) continue;
          for (const Ticket ticket : tickets) world.wait(ticket, side.get(), test_deadline());
          tickets.clear();
        }
        for (const Ticket ticket : tickets) world.wait(ticket, side.get(), test_deadline());
      }
    }
    side.land();
    for (std::uint32_t i = 0; i < kLayers; ++i) rings[i].expect_complete();
    for (std::uint32_t i = 0; i < kLayers * kRanges; ++i) {
      EXPECT_TRUE(states[i].read() == payload_of(70 + i, 0, bytes)) << "rank " << rank << ", states " << i;
    }
    world.barrier(test_deadline());  // no stream of a rank is gone while another one works
  });
}

// What is announced once is posted many times, in any order, between exchanges that were not announced.
TEST_P(Conformance, RepeatsWhatIsAnnounced) {
  run([](Transport& world) {
    RingAllGather ring(world, 31, 3001);
    RandomExchange all(world, 32, 1.0);
    std::vector<Exchange> repeated{ring.exchange(), all.exchange};
    for (Exchange& exchange : repeated) {  // addresses of what is sent may come later
      for (SendMessage& message : exchange.sends) {
        for (SendSpan& span : message.spans) span.data = nullptr;
      }
    }
    const std::int64_t first = world.announce(repeated, test_deadline());
    const std::int64_t second = world.announce({}, test_deadline());
    EXPECT_EQ(second, first == kNotAnnounced ? kNotAnnounced : first + 2);
    std::vector<Ticket> tickets;
    const auto post = [&](Exchange exchange, std::int64_t number) {
      if (first != kNotAnnounced) exchange.announced = first + number;
      tickets.push_back(world.post(std::move(exchange), rank_stream()));
    };
    for (const int number : {0, 1, 1, 0, 1, 0, 0}) {
      post(number == 0 ? ring.exchange() : all.exchange, number);
      RingAllGather other(world, 33, 500);
      tickets.push_back(world.post(other.exchange(), rank_stream()));
      for (const Ticket ticket : tickets) world.wait(ticket, rank_stream(), test_deadline());
      tickets.clear();
      other.expect_complete();
      if (number == 0) {
        ring.expect_complete();
        ring.clear();
      } else {
        all.expect_complete(world.rank());
        all.clear();
      }
    }
  });
}

TEST_P(Conformance, FinishesByProgressAlone) {
  run([](Transport& world) {
    RingAllGather ring(world, 21, 5000);
    const Ticket ticket = world.post(ring.exchange(), rank_stream());
    const Deadline deadline = test_deadline();
    while (!world.finished(ticket) && !deadline.expired()) {
      world.progress();
      std::this_thread::yield();
    }
    EXPECT_TRUE(world.finished(ticket));
    ring.expect_complete();
    world.wait(ticket, rank_stream(), Deadline::after(0.0));  // a deadline in the past is no failure of what is done
    world.barrier(test_deadline());                           // the others may need this rank's progress until here
  });
}

TEST_P(Conformance, TakesEmptyExchanges) {
  run([](Transport& world) {
    for (int i = 0; i < 20; ++i) world.wait(world.post({}, rank_stream()), rank_stream(), test_deadline());
    expect_ring(world, 1, 10);  // still in step
  });
}

TEST_P(Conformance, GathersUnevenBytes) {
  run([](Transport& world) {
    const auto text = [](int rank, int call) {
      return std::string(static_cast<std::size_t>((rank * 37 + call * 11) % 5000), static_cast<char>('a' + rank % 26));
    };
    for (int call = 0; call < 20; ++call) {
      const std::vector<std::string> all = world.all_gather(text(world.rank(), call), test_deadline());
      ASSERT_EQ(all.size(), static_cast<std::size_t>(world.size()));
      for (int rank = 0; rank < world.size(); ++rank) EXPECT_EQ(all[static_cast<std::size_t>(rank)], text(rank, call));
    }
    const std::string large(100'000, static_cast<char>(world.rank()));
    const std::vector<std::string> all = world.all_gather(world.rank() == 0 ? large : std::string(), test_deadline());
    EXPECT_EQ(all[0], std::string(100'000, '\0'));
  });
}

TEST_P(Conformance, MeetsWhileExchangesFly) {
  run([](Transport& world) {
    RingAllGather ring(world, 2, 20'000);
    const Ticket ticket = world.post(ring.exchange(), rank_stream());
    for (int i = 0; i < 10; ++i) world.barrier(test_deadline());
    world.wait(ticket, rank_stream(), test_deadline());
    ring.expect_complete();
  });
}

TEST_P(Conformance, SplitsToEverySize) {
  run([](Transport& world) {
    for (int size = 1; size <= world.size(); size = size < 8 ? size + 1 : size * 2) {
      const std::unique_ptr<Transport> part = world.split_world(size, test_deadline());
      ASSERT_EQ(part != nullptr, world.rank() < size);
      if (part != nullptr) {
        EXPECT_EQ(part->rank(), world.rank());
        EXPECT_EQ(part->size(), size);
        EXPECT_EQ(part->route(), world.route());
        expect_ring(*part, static_cast<std::uint32_t>(size), 333);
        EXPECT_EQ(part->all_gather("x", test_deadline()).size(), static_cast<std::size_t>(size));
        if (size > 1) {
          const std::unique_ptr<Transport> half = part->split_world(size / 2, test_deadline());
          if (half != nullptr) expect_ring(*half, 4, 100);
        }
      }
      expect_ring(world, 50, 10);
    }
  });
}

TEST_P(Conformance, RefusesWhatBreaksTheContract) {
  run([](Transport& world) {
    const auto expect_internal = [](const std::function<void()>& call) {
      try {
        call();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInternal) << error.what();
      }
    };
    std::byte byte{};
    const int peer = (world.rank() + 1) % world.size();
    expect_internal([&] { world.post({"to itself", {{world.rank(), 0, {{&byte, 1}}}}, {}}, rank_stream()); });
    expect_internal([&] { world.post({"", {}, {{world.size(), 0, {{&byte, 1}}}}}, rank_stream()); });
    expect_internal([&] { world.post({"", {{-1, 0, {}}}, {}}, rank_stream()); });
    expect_internal([&] { world.post({"descending", {{peer, 1, {}}, {peer, 0, {}}}, {}}, rank_stream()); });
    expect_internal([&] { world.post({"twice", {}, {{peer, 0, {}}, {peer, 0, {}}}}, rank_stream()); });
    expect_internal([&] { world.post({"nowhere", {{peer, 0, {{nullptr, 1}}}}, {}}, rank_stream()); });
    expect_internal([&] { world.split_world(0, test_deadline()); });
    expect_internal([&] { world.split_world(world.size() + 1, test_deadline()); });
    expect_ring(world, 1, 10);  // nothing of the above has been posted
    expect_internal([&] { world.wait(1234, rank_stream(), test_deadline()); });
  });
}

TEST_P(Conformance, AgreesOnSuccess) {
  run([](Transport& world) { agree(world, nullptr, test_deadline()); });
}

// No rank's location is added, and the location of an error on which some of the ranks have agreed before stays.
TEST_P(Conformance, NamesNoRankWhereAllFailAlike) {
  run([](Transport& world) {
    Error mine(ErrorCode::kFile, "can't open x", "it isn't there", "Check the path.");
    const auto told = [&]() -> std::string {
      try {
        agree(world, &mine, test_deadline());
      } catch (const AgreedError& error) {
        EXPECT_NE(error.location(), nullptr);
        return error.what();
      }
      return "nothing";
    };
    EXPECT_EQ(told(), "can't open x (it isn't there). Check the path.");
    mine = Error(ErrorCode::kFile, fmt::format("rank {} has failed", world.rank()));
    mine.set_location({7, "h7"});
    EXPECT_EQ(told(), "rank 0 has failed.");
  });
}

TEST_P(Conformance, AgreesOnTheLowestFailure) {
  run([](Transport& world) {
    const int first = world.size() / 2;
    const Error mine(world.rank() % 2 == 0 ? ErrorCode::kFile : ErrorCode::kMemory,
                     fmt::format("rank {} can't", world.rank()), "it is told so",
                     {"Use ", setting("ranks", first), "."});
    bool agreed = false;
    try {
      agree(world, world.rank() >= first ? &mine : nullptr, test_deadline());
    } catch (const AgreedError& error) {
      agreed = true;
      EXPECT_EQ(error.code(), first % 2 == 0 ? ErrorCode::kFile : ErrorCode::kMemory);
      const std::string place = world.size() == 1 ? "" : fmt::format("rank {} on {}: ", first, host_name());
      EXPECT_EQ(error.what(), place + fmt::format("rank {0} can't (it is told so). Use ranks = {0}.", first));
      EXPECT_EQ(error.suggestion(), mine.suggestion());
      EXPECT_EQ(*error.location(), (ErrorLocation{first, host_name()}));
    }
    EXPECT_TRUE(agreed);
    agree(world, nullptr, test_deadline());  // the world lives on
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Conformance, ::testing::ValuesIn(world_cases()),
                         [](const ::testing::TestParamInfo<WorldCase>& world) { return world.param.name; });

}  // namespace
}  // namespace ringattn::testing
