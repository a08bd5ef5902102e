// SPDX-License-Identifier: Apache-2.0
// Ranks that meet: whatever goes wrong on one of them reaches all, at once and with the same words.
#include "comm/collective.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <functional>
#include <limits>
#include <new>
#include <stdexcept>
#include <system_error>

#include "base/host.hpp"
#include "comm/numa_binding.hpp"
#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
namespace {

using testing::error_of;

constexpr int kRanks = 4;
// An upper bound that is never reached: a test whose ranks wait for one that has failed takes longer than kMoment.
constexpr double kLong = 60.0;
constexpr double kMoment = 20.0;

// What run_collectively() throws on each rank when `fail` is run on rank `failing`; every rank must throw.
std::vector<AgreedError> errors_of(int failing, const std::function<void()>& fail) {
  const Deadline moment = Deadline::after(kMoment);
  std::vector<AgreedError> errors(kRanks, AgreedError(Error(ErrorCode::kInternal, "nothing was thrown")));
  run_threads_world(kRanks, {}, [&](Transport& world) {
    const Collective collective(world, Timeouts(kLong));
    try {
      collective.run_collectively([&] {
        if (world.rank() == failing) fail();
      });
    } catch (const AgreedError& error) {
      errors[static_cast<std::size_t>(world.rank())] = error;
    }
  });
  EXPECT_FALSE(moment.expired()) << "ranks waited for one that had failed";
  return errors;
}

TEST(RunCollectively, AFailedAllocationReachesEveryRank) {
  for (const AgreedError& error : errors_of(2, [] { throw std::bad_alloc(); })) {
    EXPECT_EQ(error.code(), ErrorCode::kMemory) << error.what();
    EXPECT_EQ(*error.location(), (ErrorLocation{2, host_name()}));
  }
}

// A host whose first and last processor are nodes. Ranks that are bound already stay where they are.
TEST(NumaBinding, PutsEachRankOnItsNode) {
  const CpuList all = usable_cpus();
  if (all.size() < 2 || !openmp_binding().empty()) GTEST_SKIP() << "needs: two processors, not bound by OpenMP";
  const CpuList second(all.begin() + 1, all.end());
  const NumaTopology topology{{all.front()}, second};
  const bool even = all.size() == 2;  // else the first rank would lose processors
  run_threads_world(2, {}, [&](Transport& world) {
    const CpuList& node = topology[static_cast<std::size_t>(world.rank())];
    EXPECT_EQ(bind_rank_to_numa_node(Collective(world, Timeouts(kLong)), {all}), "");
    EXPECT_EQ(usable_cpus(), all) << "one node";
    EXPECT_EQ(bind_rank_to_numa_node(Collective(world, Timeouts(kLong)), topology), "");
    EXPECT_EQ(usable_cpus(), even ? node : all);
    EXPECT_EQ(bind_thread(node), "");
    EXPECT_EQ(bind_rank_to_numa_node(Collective(world, Timeouts(kLong)), topology), "");
    EXPECT_EQ(usable_cpus(), node) << "bound before";
  });
  EXPECT_EQ(usable_cpus(), all);
}

TEST(RunCollectively, SoDoErrorsAndWhatIsNoneOfOurs) {
  for (const AgreedError& error : errors_of(0, [] { throw Error(ErrorCode::kFile, "no such file."); })) {
    EXPECT_EQ(error.code(), ErrorCode::kFile);
    EXPECT_EQ(error.what(), "rank 0 on " + host_name() + ": no such file.");
    EXPECT_EQ(*error.location(), (ErrorLocation{0, host_name()}));
  }
  for (const AgreedError& error : errors_of(3, [] { throw std::out_of_range("at"); })) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
  }
  const auto no_thread = [] { throw std::system_error(EAGAIN, std::generic_category()); };
  for (const AgreedError& error : errors_of(1, no_thread)) EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  for (const AgreedError& error : errors_of(1, [] { throw 5; })) EXPECT_EQ(error.code(), ErrorCode::kInternal);
}

TEST(RunCollectively, TheLowestRankIsHeard) {
  run_threads_world(kRanks, {}, [](Transport& world) {
    const Collective collective(world, Timeouts(kLong));
    const Error error = error_of([&] {
      collective.run_collectively([&] {
        if (world.rank() > 0) throw Error(ErrorCode::kFile, "rank " + std::to_string(world.rank()) + ".");
      });
    });
    EXPECT_EQ(error.what(), "rank 1 on " + host_name() + ": rank 1.");
    collective.barrier();  // the world lives on
  });
}

// An AgreedError is known to all ranks already: agreeing on it once more would be a collective too many.
TEST(RunCollectively, PassesAgreedErrorsOn) {
  run_threads_world(kRanks, {}, [](Transport& world) {
    const Collective collective(world, Timeouts(kLong));
    const Error error = error_of([&] {
      collective.run_collectively([&] {
        collective.run_collectively([&] {
          if (world.rank() == 1) throw Error(ErrorCode::kUsage, "inside.");
        });
      });
    });
    EXPECT_EQ(error.what(), "rank 1 on " + host_name() + ": inside.");
    EXPECT_EQ(collective.gather_values(world.rank()), (std::vector<int>{0, 1, 2, 3}));
  });
}

TEST(RunCollectively, ReturnsWhereNothingFails) {
  std::atomic<int> ran{0};
  run_threads_world(kRanks, {},
                    [&](Transport& world) { Collective(world, Timeouts(kLong)).run_collectively([&] { ++ran; }); });
  EXPECT_EQ(ran, kRanks);
}

TEST(Gather, TakesTextsOfAnyLength) {
  const auto text_of = [](int rank) {
    return std::string(rank == 2 ? 0 : static_cast<std::size_t>(rank) * 5000 + 3, static_cast<char>('a' + rank));
  };
  run_threads_world(kRanks, {}, [&](Transport& world) {
    const std::vector<std::string> all = Collective(world, Timeouts(kLong)).gather(text_of(world.rank()));
    ASSERT_EQ(all.size(), static_cast<std::size_t>(kRanks));
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(all[static_cast<std::size_t>(rank)], text_of(rank));
  });
  const auto alone = make_self_transport();
  EXPECT_EQ(Collective(*alone, Timeouts(kLong)).gather("x"), std::vector<std::string>{"x"});
}

// The rank that doesn't come is named, after the time that the rule allows for what it is said to do.
TEST(Timeouts, RuleIsOnePlace) {
  EXPECT_EQ(Timeouts(2.0).for_peer().seconds(), 2.0);
  for (const double seconds : {std::nan(""), -1.0, 0.0, 0.0009, 1.1e6, std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(error_of([&] { Timeouts{seconds}; }).code(), ErrorCode::kUsage) << seconds;
  }
  EXPECT_EQ(Timeouts::derived(3e6).for_peer().seconds(), 3e6) << "what follows from others is not asked for";
  EXPECT_EQ(Timeouts(2.0).for_work(0.0).seconds(), 2.0);
  EXPECT_EQ(Timeouts(2.0).for_work(0.5).seconds(), 7.0);
  EXPECT_TRUE(Timeouts::none().expired());
  EXPECT_LT(Timeouts::for_address().seconds(), Timeouts::for_answer().seconds()) << "who has been reached may be busy";
  EXPECT_EQ(Timeouts::grace(0.5).seconds(), 0.5);
  auto world = make_threads_world(2);
  const Error error = error_of([&] { Collective(*world[0], Timeouts(0.05)).barrier(0.001); });
  EXPECT_EQ(error.code(), ErrorCode::kPeer);
  EXPECT_NE(std::string(error.what()).find("within 0.06 s (rank 0 waits for rank 1)"), std::string::npos)
      << error.what();
}

// A rank that tells something else than ranks do: the world of one, whose other rank is the test's.
class TwoRanks final : public Bootstrap {
 public:
  explicit TwoRanks(std::vector<std::string> texts) : texts_(std::move(texts)) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::vector<std::string> all_gather(std::string_view bytes, const Deadline&) override {
    return {std::string(bytes), next_ < texts_.size() ? texts_[next_++] : std::string()};
  }
  void barrier(const Deadline&) override {}

 private:
  std::vector<std::string> texts_;
  std::size_t next_ = 0;
};

TEST(Agree, TakesNoErrorThatIsNone) {
  for (const std::string& text : {std::string(), std::string("n"), std::string("p"), std::string("x\3a"),
                                  std::string("p\0\0\0", 4), std::string("n\xff"), std::string("n\3no place")}) {
    TwoRanks world({"mark", text});
    const Error error = error_of([&] { agree(world, nullptr, Deadline::after(kLong)); });
    EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
    EXPECT_NE(std::string(error.what()).find("rank 1 failed and did not say how"), std::string::npos) << error.what();
  }
  Error located(ErrorCode::kFile, "no such file");
  located.set_location({1, "node7"});
  TwoRanks world({"mark", 'n' + pack_error(located)});
  EXPECT_STREQ(error_of([&] { agree(world, nullptr, Deadline::after(kLong)); }).what(),
               "rank 1 on node7: no such file.");
}

TEST(Gathering, TakesNoTextThatIsShorterThanItsStruct) {
  TwoRanks world({"abc"});
  EXPECT_EQ(error_of([&] { Collective(world, Timeouts(kLong)).gather_values(std::int64_t{1}); }).code(),
            ErrorCode::kPeer);
  const std::uint64_t length = 5000;
  TwoRanks longer({std::string(reinterpret_cast<const char*>(&length), sizeof length), std::string(2048, 'x'), "y"});
  EXPECT_EQ(error_of([&] { Collective(longer, Timeouts(kLong)).gather("mine"); }).code(), ErrorCode::kPeer);
}

}  // namespace
}  // namespace ringattn
