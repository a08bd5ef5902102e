// SPDX-License-Identifier: Apache-2.0
// What every transport must do when ranks don't come, fail or disagree. Runs in each world of world_cases().
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "tests/comm/exchanges.hpp"
#include "tests/comm/world_cases.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

// A deadline that tests let pass, and how much later than that a call may end on a busy machine.
const double kShort = 0.05;
const double kSlack = 5.0;

class Failures : public ::testing::TestWithParam<WorldCase> {
 protected:
  void SetUp() override {
    if (!GetParam().needs.empty()) GTEST_SKIP() << "needs " << GetParam().needs;
  }
};

double seconds_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

// Every rank but rank 0 makes a call that needs rank 0, which doesn't come. (Rank 0 because it is named first, should
// ranks of a busy machine be late too.)
void expect_blame(const WorldCase& world_case, const std::function<void(Transport&, const Deadline&)>& call,
                  const std::string& what) {
  world_case.run([&](Transport& world) {
    if (world.rank() == 0) return 0;
    const auto start = Deadline::Clock::now();
    const Error error = error_of([&] { call(world, Deadline::after(kShort)); });
    EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
    EXPECT_NE(std::string(error.what()).find("waits for rank 0"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    EXPECT_GE(seconds_since(start), kShort);
    EXPECT_LT(seconds_since(start), kShort + kSlack);
    return 0;
  });
}

TEST_P(Failures, NamesThePeerThatNeverSends) {
  expect_blame(
      GetParam(),
      [](Transport& world, const Deadline& deadline) {
        const Memory byte(world, Bytes(1));
        Exchange exchange{"block 3 of 12", {}, {{0, 0, {{byte.data(), 1}}}}};
        world.wait(world.post(exchange, rank_stream()), rank_stream(), deadline);
      },
      "block 3 of 12");
}

TEST_P(Failures, NamesThePeerThatNeverReceives) {
  expect_blame(
      GetParam(),
      [](Transport& world, const Deadline& deadline) {
        constexpr std::size_t kLarge = 1 << 20;  // more than any transport takes ahead of its receive
        const Memory large(world, Bytes(kLarge));
        Exchange exchange{"block 4 of 12", {{0, 0, {{large.data(), kLarge}}}}, {}};
        world.wait(world.post(exchange, rank_stream()), rank_stream(), deadline);
      },
      "block 4 of 12");
}

TEST_P(Failures, NamesTheRankThatMissesABarrier) {
  expect_blame(
      GetParam(), [](Transport& world, const Deadline& deadline) { world.barrier(deadline); }, "barrier");
}

TEST_P(Failures, NamesTheRankThatMissesAnAllGather) {
  expect_blame(
      GetParam(), [](Transport& world, const Deadline& deadline) { world.all_gather("abc", deadline); }, "all-gather");
}

TEST_P(Failures, NamesTheRankThatMissesASplit) {
  expect_blame(
      GetParam(), [](Transport& world, const Deadline& deadline) { world.split_world(1, deadline); }, "split");
}

// A send that waits for this rank's own receive is no fault of its receiver.
TEST_P(Failures, BlamesOnlyTheRankThatIsWaitedFor) {
  GetParam().run([&](Transport& world) {
    if (world.size() < 3 || world.rank() != 1) return 0;  // the other ranks post nothing
    constexpr std::size_t kLarge = 1 << 20;
    const Memory buffer(world, Bytes(kLarge));
    Exchange exchange{"chain", {{2, 1, {{buffer.data(), kLarge}}}}, {{0, 0, {{buffer.data(), kLarge}}}}};
    const Error error =
        error_of([&] { world.wait(world.post(exchange, rank_stream()), rank_stream(), Deadline::after(kShort)); });
    EXPECT_NE(std::string(error.what()).find("waits for rank 0"), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find("rank 2"), std::string::npos) << error.what();
    return 0;
  });
}

// The last rank aborts while all others are blocked in `call`; each of them learns its code and text, with the
// suggestion in its parts.
void expect_aborted(const WorldCase& world_case, const std::function<void(Transport&)>& call) {
  const MessageTemplate suggestion{"Raise ", setting("timeout", 5), "."};
  const int printers = world_case.run([&](Transport& world) {
    const int failed = world.size() - 1;
    const auto start = Deadline::Clock::now();
    int prints = 0;
    if (world.rank() == failed) {
      world.barrier(test_deadline());  // all ranks have finished entering the world
      if (world.abort(Error(ErrorCode::kFile, "the disk is on fire.", {}, suggestion))) prints = 1;
    } else {
      const Error error = error_of([&] {
        world.barrier(test_deadline());  // may be late enough to hear of the abort itself
        call(world);
      });
      EXPECT_EQ(error.code(), ErrorCode::kFile) << error.what();
      EXPECT_NE(std::string(error.what()).find("the disk is on fire."), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(fmt::format("rank {}", failed)), std::string::npos) << error.what();
      EXPECT_EQ(error.suggestion(), suggestion) << error.what();
      if (world.abort(error)) prints = 1;  // as a program would, with what it was told
    }
    EXPECT_LT(seconds_since(start), kSlack);
    // From here on every call ends the same way.
    EXPECT_EQ(error_of([&] { world.progress(); }).code(), ErrorCode::kFile);
    EXPECT_EQ(error_of([&] { world.barrier(test_deadline()); }).code(), ErrorCode::kFile);
    EXPECT_EQ(error_of([&] { world.all_gather("", test_deadline()); }).code(), ErrorCode::kFile);
    EXPECT_EQ(error_of([&] { world.split_world(1, test_deadline()); }).code(), ErrorCode::kFile);
    return prints;
  });
  EXPECT_EQ(printers, 1);
}

TEST_P(Failures, AbortsAWait) {
  expect_aborted(GetParam(), [](Transport& world) {
    const Memory byte(world, Bytes(1));
    Exchange exchange{"never", {}, {{world.size() - 1, 0, {{byte.data(), 1}}}}};
    world.wait(world.post(exchange, rank_stream()), rank_stream(), test_deadline());
  });
}

TEST_P(Failures, AbortsABarrier) {
  expect_aborted(GetParam(), [](Transport& world) { world.barrier(test_deadline()); });
}

TEST_P(Failures, AbortsAnAllGather) {
  expect_aborted(GetParam(), [](Transport& world) { world.all_gather("abc", test_deadline()); });
}

TEST_P(Failures, AbortsASplitWorldToo) {
  GetParam().run([&](Transport& world) {
    const int failed = world.size() - 1;
    if (world.rank() == failed) {
      const std::unique_ptr<Transport> part = world.split_world(std::max(1, failed), test_deadline());
      world.abort(Error(ErrorCode::kMemory, "no more."));
      return 0;
    }
    // No rank fails in the sub-world; but rank 0 doesn't come to its barrier, so only the abort ends it.
    const Error error = error_of([&] {
      const std::unique_ptr<Transport> part = world.split_world(std::max(1, failed), test_deadline());
      if (world.rank() == 0) {
        world.barrier(test_deadline());
      } else {
        part->barrier(test_deadline());
      }
    });
    EXPECT_EQ(error.code(), ErrorCode::kMemory) << error.what();
    return 0;
  });
}

TEST_P(Failures, LetsOneOfSeveralFailuresPrint) {
  const int printers = GetParam().run([&](Transport& world) {
    Error error(ErrorCode::kMemory, fmt::format("rank {}'s own failure.", world.rank()));
    try {
      world.barrier(test_deadline());
    } catch (const Error& heard) {
      error = heard;  // another rank has left the barrier and failed already
    }
    return world.abort(error) ? 1 : 0;
  });
  EXPECT_EQ(printers, 1);
}

// The rank that gives up frees its memory while peers still send to it.
TEST_P(Failures, AbandonsExchangesInFlight) {
  GetParam().run([&](Transport& world) {
    if (world.size() == 1) return 0;
    constexpr std::size_t kBytes = 200'000;
    const bool gives_up = world.rank() == 0;
    auto memory = std::make_unique<Memory>(world, Bytes(kBytes * static_cast<std::size_t>(world.size())));
    Exchange exchange{"abandoned", {}, {}};
    if (gives_up) {
      for (int peer = 1; peer < world.size(); ++peer) {
        exchange.receives.push_back({peer, 0, {{memory->data() + kBytes * static_cast<std::size_t>(peer), kBytes}}});
      }
    } else {
      exchange.sends.push_back({0, 0, {{memory->data(), kBytes}}});
    }
    if (gives_up) {
      world.barrier(test_deadline());
      world.post(exchange, rank_stream());
      world.abandon();
      memory.reset();
      world.abort(Error(ErrorCode::kInternal, "given up."));
    } else {
      try {
        world.barrier(test_deadline());
        world.wait(world.post(exchange, rank_stream()), rank_stream(), test_deadline());  // may have been sent before
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("given up."), std::string::npos) << error.what();
      }
    }
    return 0;
  });
}

// Spans of other sizes on the two sides are found by at least one of them.
TEST_P(Failures, FindsSidesThatDoNotFit) {
  for (const auto& [sent, wanted] : {std::pair<std::size_t, std::size_t>{8, 4}, {4, 8}}) {
    const int found = GetParam().run([&, sent = sent, wanted = wanted](Transport& world) {
      if (world.size() == 1) return 1;
      try {
        world.barrier(test_deadline());  // no rank is ended while the world is still being made
      } catch (const Error&) {
        EXPECT_GT(world.rank(), 1);  // who may hear of the end before the barrier's own
      }
      if (world.rank() > 1) return 0;
      const Memory bytes(world, Bytes(8));
      Exchange exchange{"unequal", {}, {}};
      if (world.rank() == 0) exchange.sends.push_back({1, 0, {{bytes.data(), sent}}});
      if (world.rank() == 1) exchange.receives.push_back({0, 0, {{bytes.data(), wanted}}});
      try {
        world.wait(world.post(exchange, rank_stream()), rank_stream(), test_deadline());
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInternal) << error.what();
        EXPECT_NE(std::string(error.what()).find("two sides of unequal"), std::string::npos) << error.what();
        world.abort(error);  // the other side may be waiting
        return 1;
      }
      return 0;
    });
    EXPECT_GE(found, 1) << sent << " bytes sent, " << wanted << " wanted";
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Failures, ::testing::ValuesIn(world_cases()),
                         [](const ::testing::TestParamInfo<WorldCase>& world) { return world.param.name; });

}  // namespace
}  // namespace ringattn::testing
