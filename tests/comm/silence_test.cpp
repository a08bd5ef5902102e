// SPDX-License-Identifier: Apache-2.0
// Silence is told from work: ranks that are threads, the watchdog over them, and how far work extends a wait.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include "base/rank_liveness.hpp"
#include "comm/threads.hpp"
#include "comm/timeouts.hpp"
#include "comm/watchdog.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
namespace {

using testing::error_of;

// A limit that tests let pass, and how much later than that a call may end on a busy machine.
constexpr double kLimit = 1.0;
constexpr double kSlack = 5.0;

void never(const Error& error) {
  ADD_FAILURE() << "the last resort was called: " << error.what();
  std::abort();
}

double seconds_since(RankLiveness::Clock::time_point start) {
  return std::chrono::duration<double>(RankLiveness::Clock::now() - start).count();
}

// What a rank that hangs waits for.
class Gate {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [this] { return open_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

TEST(Silence, OfAThreadEndsEveryWaitOfTheOthers) {
  Gate gate;
  const auto start = RankLiveness::Clock::now();
  std::atomic<int> told{0};
  const RanksLimit limit{kLimit, never};
  const Error error = error_of([&] {
    run_ranks(
        make_threads_world(3),
        [&](Transport& world) {
          if (world.rank() == 1) return gate.wait();
          const Error mine = error_of([&] {
            // Rank 0 waits, rank 2 computes and joins no collective.
            if (world.rank() == 0) world.barrier(Deadline::after(Deadline::kMaxSeconds));
            for (;;) world.progress();
          });
          EXPECT_EQ(mine.code(), ErrorCode::kPeer);
          EXPECT_NE(std::string(mine.what()).find("rank 1 fell silent"), std::string::npos) << mine.what();
          if (++told == 2) gate.open();
          throw Error(mine);
        },
        &limit);
  });
  EXPECT_EQ(error.code(), ErrorCode::kPeer);
  EXPECT_GE(seconds_since(start), kLimit);
  EXPECT_LT(seconds_since(start), kLimit + kSlack);
}

TEST(Silence, IsNeitherWorkNorWaiting) {
  const RanksLimit limit{0.5, never};
  run_ranks(
      make_threads_world(3),
      [](Transport& world) {
        const Deadline busy = Deadline::after(2.0);
        volatile int spins = 0;
        if (world.rank() == 0) {
          while (!busy.expired()) heartbeat();
        } else if (world.rank() == 1) {
          while (!busy.expired()) spins = spins + 1;  // uses the processor and says nothing
        }
        // Passed long before the others come: their work extends it.
        world.barrier(Deadline::after(0.1));
      },
      &limit);
}

TEST(Silence, EndsTheProcessWhereTheThreadNeverComesBack) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    const RanksLimit limit{0.3, [](const Error& error) {
                             end_with(error,
                                      [](const Error& late) { std::fprintf(stderr, "message: %s\n", late.what()); });
                           }};
    run_ranks(
        make_threads_world(2),
        [](Transport& world) {
          Gate closed;
          if (world.rank() == 1) closed.wait();
          world.barrier(Deadline::after(Deadline::kMaxSeconds));
        },
        &limit);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(6), "message: rank 1 fell silent");
}

// All threads are silent: none is left to notice it in a wait.
TEST(Silence, OfAllThreadsEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    const RanksLimit limit{0.3, [](const Error& error) { end_with(error, [](const Error&) {}); }};
    run_ranks(
        make_threads_world(2), [](Transport&) { Gate().wait(); }, &limit);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(6), "");
}

// A destructor that hangs while a failure unwinds: the failure's own code, not that of silence.
TEST(Silence, OfAnUnwindingRankKeepsTheFirstCode) {
  struct Stuck {
    ~Stuck() { Gate().wait(); }
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    const RanksLimit limit{60.0, [](const Error& error) { end_with(error, [](const Error&) {}); }};
    run_ranks(
        make_threads_world(2),
        [](Transport& world) {
          if (world.rank() == 1) throw Error(ErrorCode::kFile, "the disk is on fire.");
          const Stuck stuck;
          world.barrier(Deadline::after(Deadline::kMaxSeconds));
        },
        &limit);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(3), "");
}

TEST(Watchdog, LetsAThreadGoThatShowsLife) {
  class PlainLiveness final : public RankLiveness {
   public:
    using RankLiveness::RankLiveness;
  };
  PlainLiveness liveness(0);
  std::atomic<int> silent{0};
  const RankLivenessScope scope(liveness);
  const Watchdog watchdog({&liveness}, {0.5, [&](const RankLiveness&) { ++silent; }, never});
  for (const Deadline busy = Deadline::after(1.5); !busy.expired();) waiting_heartbeat();
  EXPECT_EQ(silent, 0);
  Gate gate;
  std::thread opener([&] {
    for (const Deadline late = Deadline::after(20.0); silent == 0 && !late.expired();) std::this_thread::yield();
    gate.open();
  });
  gate.wait();
  opener.join();
  EXPECT_EQ(silent, 1);
}

TEST(WaitedEnough, IsTheDeadlineWhereNobodyElseWorks) {
  EXPECT_FALSE(wait_expired(Deadline::after(60.0)));
  EXPECT_TRUE(wait_expired(Deadline::after(0.0)));
}

}  // namespace
}  // namespace ringattn
