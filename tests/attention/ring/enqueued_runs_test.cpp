// SPDX-License-Identifier: Apache-2.0
// Runs that have not been waited for yet, and one that fails in the middle: it gives up what is in flight, whatever
// part of it fails, and all other ranks end at once.
#include "attention/ring/enqueued_runs.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "base/rank_liveness.hpp"
#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/registry.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr double kTimeLimit = 600.0;  // of waits for peers
constexpr double kSoon = 60.0;        // far below that, and far above what a run takes on a busy machine

std::unique_ptr<Backend> host_backend() {
  return choose_kernel(make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), KernelRequest{"cpu", "auto"})
      .row->make_backend({1, 0});
}

// A byte from each rank to the next one.
struct Bytes {
  std::byte sent{};
  std::byte received{};

  Exchange exchange(const Transport& world) {
    const int size = world.size();
    Exchange all;
    all.sends.push_back({(world.rank() + 1) % size, 0, {{&sent, 1}}});
    all.receives.push_back({(world.rank() + size - 1) % size, 0, {{&received, 1}}});
    return all;
  }
};

constexpr const char* kFailure = "a run that fails (the test wants it). Nothing is to be done.";
void fail_run() { fail(ErrorCode::kUsage, "a run that fails", "the test wants it", "Nothing is to be done."); }

class NotedLiveness final : public RankLiveness {
 public:
  using RankLiveness::RankLiveness;

  std::string failure;
  void on_failure(const Error& error) noexcept override { failure = error.what(); }
};

TEST(EnqueuedRuns, AreWaitedForOnce) {
  const auto self = make_self_transport();
  const auto backend = host_backend();
  EnqueuedRuns runs(*backend, *self, Timeouts(kTimeLimit));
  EXPECT_FALSE(runs.any());
  int done = 0;
  for (int i = 0; i < 3; ++i) runs.enqueue({}, 0.0, [&] { ++done; });
  EXPECT_EQ(done, 3);
  EXPECT_TRUE(runs.any());
  runs.wait_all();
  EXPECT_FALSE(runs.any());
  EXPECT_EQ(error_of([&] { runs.enqueue({}, 0.0, fail_run); }).code(), ErrorCode::kUsage);
  EXPECT_FALSE(runs.any()) << "what failed is not waited for";
}

// Rank 1 of 3 fails between an exchange that it has posted and the end of its run.
TEST(EnqueuedRuns, AFailureGivesUpWhatIsInFlight) {
  const auto start = std::chrono::steady_clock::now();
  const Error error = error_of([&] {
    run_threads_world(3, {}, [&](Transport& world) {
      NotedLiveness liveness(world.rank());
      const RankLivenessScope scope(liveness);
      const auto backend = host_backend();
      EnqueuedRuns runs(*backend, world, Timeouts(kTimeLimit));
      Bytes bytes;
      try {
        runs.enqueue({}, 0.0, [&] {
          const Ticket ticket = world.post(bytes.exchange(world), {});
          if (world.rank() == 1) fail_run();
          world.wait(ticket, {}, Deadline::after(kTimeLimit));
        });
        world.barrier(Deadline::after(kTimeLimit));
      } catch (const Error&) {
        if (world.rank() == 1) {
          EXPECT_EQ(liveness.failure, kFailure) << "it is noted before the stack unwinds further";
          const std::string refused = error_of([&] { world.post(bytes.exchange(world), {}); }).what();
          EXPECT_NE(refused.find("has given up earlier exchanges"), std::string::npos) << refused;
        }
        throw;
      }
    });
  });
  EXPECT_STREQ(error.what(), kFailure);
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), kSoon);
}

}  // namespace
}  // namespace ringattn::testing
