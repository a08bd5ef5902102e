// SPDX-License-Identifier: Apache-2.0
// What every transport must do, whatever moves its bytes. Runs in each world of world_cases().
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "base/philox.hpp"
#include "tests/comm/world_cases.hpp"

namespace ringattn {
namespace {

// Bounds that only a failing test reaches.
const double kPatience = 20.0;
// A deadline that tests let pass, and how much later than that a call may end on a busy machine.
const double kShort = 0.2;
const double kSlack = 5.0;

Deadline patience() { return Deadline::after(kPatience); }

std::byte payload(std::uint32_t seed, int owner, std::size_t index) {
  const PhiloxWords words =
      philox4x32_10({{seed, static_cast<std::uint32_t>(owner), static_cast<std::uint32_t>(index / 16), 0}}, 1);
  return static_cast<std::byte>(words.word[index / 4 % 4] >> (index % 4 * 8));
}

using Bytes = std::vector<std::byte>;

Bytes payload_of(std::uint32_t seed, int owner, std::size_t bytes) {
  Bytes all(bytes);
  for (std::size_t i = 0; i < bytes; ++i) all[i] = payload(seed, owner, i);
  return all;
}

constexpr std::byte kUntouched{0xEE};

// A ring all-gather as one exchange: in round r every rank hands on what it received in round r − 1. Slots lie at odd
// addresses, with a guard byte around each.
class RingAllGather {
 public:
  RingAllGather(const Transport& world, std::uint32_t seed, std::size_t bytes)
      : rank_(world.rank()),
        size_(world.size()),
        seed_(seed),
        bytes_(bytes),
        memory_(1 + slots() * (bytes + 1), kUntouched) {
    const Bytes own = payload_of(seed, rank_, bytes);
    std::copy(own.begin(), own.end(), slot(rank_));
  }

  Exchange exchange() {
    Exchange all;
    all.label = fmt::format("ring of {} bytes", bytes_);
    for (int round = 0; round + 1 < size_; ++round) {
      const int sent = (rank_ - round + size_) % size_;
      const int received = (sent - 1 + size_) % size_;
      all.sends.push_back({(rank_ + 1) % size_, round, {{slot(sent), bytes_}}});
      all.receives.push_back({(rank_ - 1 + size_) % size_, round, {{slot(received), bytes_}}});
    }
    return all;
  }

  void expect_complete() {
    for (int owner = 0; owner < size_; ++owner) {
      const Bytes expected = payload_of(seed_, owner, bytes_);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), slot(owner)))
          << "rank " << rank_ << " has a wrong copy of rank " << owner << "'s " << bytes_ << " bytes";
      EXPECT_EQ(slot(owner)[-1], kUntouched);
      EXPECT_EQ(slot(owner)[bytes_], kUntouched);
    }
  }

 private:
  std::size_t slots() const { return static_cast<std::size_t>(size_); }
  std::byte* slot(int owner) { return memory_.data() + 1 + static_cast<std::size_t>(owner) * (bytes_ + 1); }

  int rank_;
  int size_;
  std::uint32_t seed_;
  std::size_t bytes_;
  Bytes memory_;
};

// Posts, waits and checks one ring.
void expect_ring(Transport& world, std::uint32_t seed, std::size_t bytes) {
  RingAllGather ring(world, seed, bytes);
  world.wait(world.post(ring.exchange(), Stream{}), Stream{}, patience());
  ring.expect_complete();
}

class Conformance : public testing::TestWithParam<WorldCase> {
 protected:
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
    EXPECT_EQ(world.memory(), MemoryKind::kHost);
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
    for (const std::size_t bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{1000}, std::size_t{4096}, std::size_t{100'003}}) {
      expect_ring(world, seed++, bytes);
    }
  });
}

TEST_P(Conformance, MovesLargeMessages) {
  run([](Transport& world) { expect_ring(world, 3, world.size() > 8 ? 50'000 : 3'000'001); });
}

// A random set of messages that all ranks derive from the seed; each has its own payload and odd spans, some empty.
struct RandomExchange {
  RandomExchange(const Transport& world, std::uint32_t seed, double density) {
    exchange.label = fmt::format("random {}", seed);
    const int rounds = static_cast<int>(draw(seed, 0, 0, 0, 0) % 4);
    for (int round = 0; round <= rounds; ++round) {
      for (int from = 0; from < world.size(); ++from) {
        for (int to = 0; to < world.size(); ++to) {
          if (from == to || draw(seed, round, from, to, 1) >= density * 0x1p32) continue;
          if (from == world.rank()) add_send(seed, round, from, to);
          if (to == world.rank()) add_receive(seed, round, from, to);
        }
      }
    }
  }

  void expect_complete(int rank) const {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(received[i] == expected[i]) << "rank " << rank << ", " << exchange.label << ", receive " << i;
    }
  }

  Exchange exchange;
  std::vector<Bytes> sent;
  std::vector<Bytes> received;
  std::vector<Bytes> expected;

 private:
  static std::uint32_t draw(std::uint32_t seed, int round, int from, int to, std::uint32_t what) {
    return philox4x32_10({{what, static_cast<std::uint32_t>(round), static_cast<std::uint32_t>(from),
                           static_cast<std::uint32_t>(to)}},
                         seed)
        .word[0];
  }
  static std::vector<std::size_t> span_sizes(std::uint32_t seed, int round, int from, int to) {
    std::vector<std::size_t> sizes(draw(seed, round, from, to, 2) % 6);  // none, too
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      sizes[i] = draw(seed, round, from, to, 3 + static_cast<std::uint32_t>(i)) % 3000;
      if (sizes[i] % 4 == 0) sizes[i] = 0;
    }
    return sizes;
  }
  static Bytes content(std::uint32_t seed, int round, int from, int to) {
    std::size_t total = 0;
    for (const std::size_t bytes : span_sizes(seed, round, from, to)) total += bytes;
    return payload_of(draw(seed, round, from, to, 99), from, total);
  }

  void add_send(std::uint32_t seed, int round, int from, int to) {
    const Bytes& bytes = sent.emplace_back(content(seed, round, from, to));
    SendMessage& message = exchange.sends.emplace_back(SendMessage{to, round, {}});
    std::size_t at = 0;
    for (const std::size_t length : span_sizes(seed, round, from, to)) {
      message.spans.push_back({bytes.data() + at, length});
      at += length;
    }
  }
  void add_receive(std::uint32_t seed, int round, int from, int to) {
    expected.push_back(content(seed, round, from, to));
    Bytes& bytes = received.emplace_back(expected.back().size(), kUntouched);
    ReceiveMessage& message = exchange.receives.emplace_back(ReceiveMessage{from, round, {}});
    std::size_t at = 0;
    for (const std::size_t length : span_sizes(seed, round, from, to)) {
      message.spans.push_back({bytes.data() + at, length});
      at += length;
    }
  }
};

TEST_P(Conformance, MovesEveryoneToEveryone) {
  run([](Transport& world) {
    RandomExchange all(world, 5, 1.0);
    world.wait(world.post(all.exchange, Stream{}), Stream{}, patience());
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
      world.wait(flying.front().first, Stream{}, patience());
      flying.front().second->expect_complete(world.rank());
      flying.erase(flying.begin());
    };
    for (std::uint32_t seed = 100; seed < 100 + exchanges; ++seed) {
      auto next = std::make_unique<RandomExchange>(world, seed, density);
      const Ticket ticket = world.post(next->exchange, Stream{});
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
    const Bytes source = payload_of(9, world.rank(), kSpans * 20);
    Bytes target(source.size(), kUntouched);
    Exchange exchange;
    exchange.sends.push_back({next, 0, {}});
    exchange.receives.push_back({previous, 0, {}});
    // Sent in order, received from the back: spans are pieces of a message, not of memory.
    for (std::size_t i = 0; i < kSpans; ++i) {
      exchange.sends[0].spans.push_back({source.data() + i * 20, i % 20});
      exchange.receives[0].spans.push_back({target.data() + (kSpans - 1 - i) * 20, i % 20});
    }
    world.wait(world.post(exchange, Stream{}), Stream{}, patience());
    const Bytes theirs = payload_of(9, previous, source.size());
    for (std::size_t i = 0; i < kSpans; ++i) {
      const std::byte* span = target.data() + (kSpans - 1 - i) * 20;
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
      tickets.push_back(world.post(rings.back().exchange(), Stream{}));
    }
    for (std::size_t i = 0; i < rings.size(); ++i) {
      world.wait(tickets[i], Stream{}, patience());
      rings[i].expect_complete();
    }
  });
}

TEST_P(Conformance, FinishesByProgressAlone) {
  run([](Transport& world) {
    RingAllGather ring(world, 21, 5000);
    const Ticket ticket = world.post(ring.exchange(), Stream{});
    const Deadline deadline = patience();
    while (!world.finished(ticket) && !deadline.expired()) {
      world.progress();
      std::this_thread::yield();
    }
    EXPECT_TRUE(world.finished(ticket));
    ring.expect_complete();
    world.wait(ticket, Stream{}, Deadline::after(0.0));  // a deadline in the past is no failure of what is done
    world.barrier(patience());                           // the others may need this rank's progress until here
  });
}

TEST_P(Conformance, TakesEmptyExchanges) {
  run([](Transport& world) {
    for (int i = 0; i < 20; ++i) world.wait(world.post({}, Stream{}), Stream{}, patience());
    expect_ring(world, 1, 10);  // still in step
  });
}

TEST_P(Conformance, GathersUnevenBytes) {
  run([](Transport& world) {
    const auto text = [](int rank, int call) {
      return std::string(static_cast<std::size_t>((rank * 37 + call * 11) % 5000), static_cast<char>('a' + rank % 26));
    };
    for (int call = 0; call < 20; ++call) {
      const std::vector<std::string> all = world.all_gather(text(world.rank(), call), patience());
      ASSERT_EQ(all.size(), static_cast<std::size_t>(world.size()));
      for (int rank = 0; rank < world.size(); ++rank) EXPECT_EQ(all[static_cast<std::size_t>(rank)], text(rank, call));
    }
    const std::string large(100'000, static_cast<char>(world.rank()));
    const std::vector<std::string> all = world.all_gather(world.rank() == 0 ? large : std::string(), patience());
    EXPECT_EQ(all[0], std::string(100'000, '\0'));
  });
}

TEST_P(Conformance, MeetsWhileExchangesFly) {
  run([](Transport& world) {
    RingAllGather ring(world, 2, 20'000);
    const Ticket ticket = world.post(ring.exchange(), Stream{});
    for (int i = 0; i < 10; ++i) world.barrier(patience());
    world.wait(ticket, Stream{}, patience());
    ring.expect_complete();
  });
}

TEST_P(Conformance, SplitsToEverySize) {
  run([](Transport& world) {
    for (int size = 1; size <= world.size(); size = size < 8 ? size + 1 : size * 2) {
      const std::unique_ptr<Transport> part = world.split(size, patience());
      ASSERT_EQ(part != nullptr, world.rank() < size);
      if (part != nullptr) {
        EXPECT_EQ(part->rank(), world.rank());
        EXPECT_EQ(part->size(), size);
        EXPECT_EQ(part->route(), world.route());
        expect_ring(*part, static_cast<std::uint32_t>(size), 333);
        EXPECT_EQ(part->all_gather("x", patience()).size(), static_cast<std::size_t>(size));
        if (size > 1) {
          const std::unique_ptr<Transport> half = part->split(size / 2, patience());
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
    expect_internal([&] { world.post({"to itself", {{world.rank(), 0, {{&byte, 1}}}}, {}}, Stream{}); });
    expect_internal([&] { world.post({"", {}, {{world.size(), 0, {{&byte, 1}}}}}, Stream{}); });
    expect_internal([&] { world.post({"", {{-1, 0, {}}}, {}}, Stream{}); });
    expect_internal([&] { world.post({"descending", {{peer, 1, {}}, {peer, 0, {}}}, {}}, Stream{}); });
    expect_internal([&] { world.post({"twice", {}, {{peer, 0, {}}, {peer, 0, {}}}}, Stream{}); });
    expect_internal([&] { world.post({"nowhere", {{peer, 0, {{nullptr, 1}}}}, {}}, Stream{}); });
    expect_internal([&] { world.split(0, patience()); });
    expect_internal([&] { world.split(world.size() + 1, patience()); });
    expect_ring(world, 1, 10);  // nothing of the above has been posted
    expect_internal([&] { world.wait(1234, Stream{}, patience()); });
  });
}

// ---- failures ----

// Runs `call`, which must throw; the caller checks what.
Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::kInternal, "");
}

double seconds_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

// Every rank but the last makes a call that needs the last rank, which doesn't come.
void expect_blame(const WorldCase& world_case, const std::function<void(Transport&, const Deadline&)>& call,
                  const std::string& what) {
  world_case.run([&](Transport& world) {
    const int absent = world.size() - 1;
    if (world.rank() == absent) return 0;
    const auto start = Deadline::Clock::now();
    const Error error = error_of([&] { call(world, Deadline::after(kShort)); });
    EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
    EXPECT_NE(std::string(error.what()).find(fmt::format("waits for rank {}", absent)), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    EXPECT_GE(seconds_since(start), kShort);
    EXPECT_LT(seconds_since(start), kShort + kSlack);
    return 0;
  });
}

TEST_P(Conformance, NamesThePeerThatNeverSends) {
  expect_blame(
      GetParam(),
      [](Transport& world, const Deadline& deadline) {
        std::byte byte{};
        Exchange exchange{"block 3 of 12", {}, {{world.size() - 1, 0, {{&byte, 1}}}}};
        world.wait(world.post(exchange, Stream{}), Stream{}, deadline);
      },
      "block 3 of 12");
}

TEST_P(Conformance, NamesThePeerThatNeverReceives) {
  expect_blame(
      GetParam(),
      [](Transport& world, const Deadline& deadline) {
        const Bytes large(1 << 20);  // more than any transport takes ahead of its receive
        Exchange exchange{"block 4 of 12", {{world.size() - 1, 0, {{large.data(), large.size()}}}}, {}};
        world.wait(world.post(exchange, Stream{}), Stream{}, deadline);
      },
      "block 4 of 12");
}

TEST_P(Conformance, NamesTheRankThatMissesABarrier) {
  expect_blame(
      GetParam(), [](Transport& world, const Deadline& deadline) { world.barrier(deadline); }, "barrier");
}

TEST_P(Conformance, NamesTheRankThatMissesAnAllGather) {
  expect_blame(
      GetParam(), [](Transport& world, const Deadline& deadline) { world.all_gather("abc", deadline); }, "all-gather");
}

TEST_P(Conformance, NamesTheRankThatMissesASplit) {
  expect_blame(
      GetParam(), [](Transport& world, const Deadline& deadline) { world.split(1, deadline); }, "split");
}

// A send that waits for this rank's own receive is no fault of its receiver.
TEST_P(Conformance, BlamesOnlyTheRankThatIsWaitedFor) {
  GetParam().run([&](Transport& world) {
    if (world.size() < 3 || world.rank() != 1) return 0;  // nobody else posts
    Bytes buffer(1 << 20);
    Exchange exchange{"chain", {{2, 1, {{buffer.data(), buffer.size()}}}}, {{0, 0, {{buffer.data(), buffer.size()}}}}};
    const Error error =
        error_of([&] { world.wait(world.post(exchange, Stream{}), Stream{}, Deadline::after(kShort)); });
    EXPECT_NE(std::string(error.what()).find("waits for rank 0"), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find("rank 2"), std::string::npos) << error.what();
    return 0;
  });
}

// The last rank aborts while all others are blocked in `call`; each of them learns its code and text.
void expect_aborted(const WorldCase& world_case, const std::function<void(Transport&)>& call) {
  const int printers = world_case.run([&](Transport& world) {
    const int failed = world.size() - 1;
    const auto start = Deadline::Clock::now();
    int prints = 0;
    if (world.rank() == failed) {
      if (world.abort(Error(ErrorCode::kFile, "the disk is on fire."))) prints = 1;
    } else {
      const Error error = error_of([&] { call(world); });
      EXPECT_EQ(error.code(), ErrorCode::kFile) << error.what();
      EXPECT_NE(std::string(error.what()).find("the disk is on fire."), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(fmt::format("rank {}", failed)), std::string::npos) << error.what();
      if (world.abort(error)) prints = 1;  // as a program would, with what it was told
    }
    EXPECT_LT(seconds_since(start), kSlack);
    // From here on every call ends the same way.
    EXPECT_EQ(error_of([&] { world.progress(); }).code(), ErrorCode::kFile);
    EXPECT_EQ(error_of([&] { world.barrier(patience()); }).code(), ErrorCode::kFile);
    EXPECT_EQ(error_of([&] { world.all_gather("", patience()); }).code(), ErrorCode::kFile);
    EXPECT_EQ(error_of([&] { world.split(1, patience()); }).code(), ErrorCode::kFile);
    return prints;
  });
  EXPECT_EQ(printers, 1);
}

TEST_P(Conformance, AbortsAWait) {
  expect_aborted(GetParam(), [](Transport& world) {
    std::byte byte{};
    Exchange exchange{"never", {}, {{world.size() - 1, 0, {{&byte, 1}}}}};
    world.wait(world.post(exchange, Stream{}), Stream{}, patience());
  });
}

TEST_P(Conformance, AbortsABarrier) {
  expect_aborted(GetParam(), [](Transport& world) { world.barrier(patience()); });
}

TEST_P(Conformance, AbortsAnAllGather) {
  expect_aborted(GetParam(), [](Transport& world) { world.all_gather("abc", patience()); });
}

TEST_P(Conformance, AbortsASplitWorldToo) {
  GetParam().run([&](Transport& world) {
    const int failed = world.size() - 1;
    const std::unique_ptr<Transport> part = world.split(std::max(1, failed), patience());
    if (world.rank() == failed) {
      world.abort(Error(ErrorCode::kMemory, "no more."));
    } else {
      // All of the part wait for the failed rank, which isn't one of them: rank 0 never comes to this barrier.
      const Error error = error_of([&] {
        if (world.rank() == 0) {
          world.barrier(patience());
        } else {
          part->barrier(patience());
        }
      });
      EXPECT_EQ(error.code(), ErrorCode::kMemory) << error.what();
    }
    return 0;
  });
}

TEST_P(Conformance, LetsOneOfSeveralFailuresPrint) {
  const int printers = GetParam().run([&](Transport& world) {
    world.barrier(patience());
    return world.abort(Error(ErrorCode::kMemory, fmt::format("rank {}'s own failure.", world.rank()))) ? 1 : 0;
  });
  EXPECT_EQ(printers, 1);
}

// The rank that gives up frees its memory while peers still send to it.
TEST_P(Conformance, AbandonsExchangesInFlight) {
  GetParam().run([&](Transport& world) {
    if (world.size() == 1) return 0;
    constexpr std::size_t kBytes = 200'000;
    const bool gives_up = world.rank() == 0;
    auto memory = std::make_unique<Bytes>(kBytes * static_cast<std::size_t>(world.size()));
    Exchange exchange{"abandoned", {}, {}};
    if (gives_up) {
      for (int peer = 1; peer < world.size(); ++peer) {
        exchange.receives.push_back({peer, 0, {{memory->data() + kBytes * static_cast<std::size_t>(peer), kBytes}}});
      }
    } else {
      exchange.sends.push_back({0, 0, {{memory->data(), kBytes}}});
    }
    const Ticket ticket = world.post(exchange, Stream{});
    if (gives_up) {
      world.abandon();
      memory.reset();
      world.abort(Error(ErrorCode::kInternal, "given up."));
    } else {
      try {
        world.wait(ticket, Stream{}, patience());  // may have been sent before
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("given up."), std::string::npos) << error.what();
      }
    }
    return 0;
  });
}

// Spans of other sizes, or a message that the other side doesn't know, are found by at least one of the two.
TEST_P(Conformance, FindsSidesThatDoNotFit) {
  for (const auto& [sent, wanted] : {std::pair<std::size_t, std::size_t>{8, 4}, {4, 8}}) {
    bool tested = false;
    const int found = GetParam().run([&, sent = sent, wanted = wanted](Transport& world) {
      if (world.size() < 2) return 1;
      tested = true;
      if (world.rank() > 1) return 0;
      Bytes bytes(8);
      Exchange exchange{"unequal", {}, {}};
      if (world.rank() == 0) exchange.sends.push_back({1, 0, {{bytes.data(), sent}}});
      if (world.rank() == 1) exchange.receives.push_back({0, 0, {{bytes.data(), wanted}}});
      try {
        world.wait(world.post(exchange, Stream{}), Stream{}, Deadline::after(kShort));
      } catch (const Error& error) {
        return error.code() == ErrorCode::kInternal ? 1 : 0;
      }
      return 0;
    });
    EXPECT_GE(found, 1) << sent << " bytes sent, " << wanted << " wanted";
    if (!tested) break;
  }
}

// ---- agree() ----

TEST_P(Conformance, AgreesOnSuccess) {
  run([](Transport& world) { agree(world, nullptr, patience()); });
}

TEST_P(Conformance, AgreesOnTheLowestFailure) {
  run([](Transport& world) {
    const int first = world.size() / 2;
    const Error mine(world.rank() % 2 == 0 ? ErrorCode::kFile : ErrorCode::kMemory,
                     fmt::format("rank {} can't.", world.rank()));
    bool agreed = false;
    try {
      agree(world, world.rank() >= first ? &mine : nullptr, patience());
    } catch (const AgreedError& error) {
      agreed = true;
      EXPECT_EQ(error.code(), first % 2 == 0 ? ErrorCode::kFile : ErrorCode::kMemory);
      EXPECT_EQ(error.what(), fmt::format("rank {} can't.", first));
    }
    EXPECT_TRUE(agreed);
    agree(world, nullptr, patience());  // the world lives on
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Conformance, testing::ValuesIn(world_cases()),
                         [](const testing::TestParamInfo<WorldCase>& world) { return world.param.name; });

}  // namespace
}  // namespace ringattn
