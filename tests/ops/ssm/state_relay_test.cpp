// SPDX-License-Identifier: Apache-2.0
// A rank in the middle hands on the states of a range as soon as they have arrived, while its kernel works on other
// ranges, and hands on each of them once, after what it depends on.
#include "ops/ssm/state_relay.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "attention/tokens/ssm_layout.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn::testing {
namespace {

using Calls = std::vector<std::string>;

// Rank 1 of 3, whose exchanges are finished when the test says so.
class MiddleRank final : public Transport {
 public:
  explicit MiddleRank(Calls& calls) : calls_(calls) {}

  void deliver(Ticket upto) { delivered_ = upto; }

  int rank() const override { return 1; }
  int size() const override { return 3; }
  std::vector<std::string> all_gather(std::string_view, const Deadline&) override { return {}; }
  void barrier(const Deadline&) override {}
  std::string_view name() const override { return "scripted"; }
  MemoryKind memory() const override { return MemoryKind::kHost; }
  Route route() const override { return Route::kDirect; }
  Ticket post(Exchange exchange, Stream) override {
    calls_.push_back(fmt::format("{} of {}", !exchange.sends.empty() ? "send" : "receive", exchange.label));
    return next_++;
  }
  void wait(Ticket ticket, Stream, const Deadline&) override { calls_.push_back(fmt::format("wait for {}", ticket)); }
  void progress() override {}
  bool finished(Ticket ticket) override { return ticket <= delivered_; }
  void abandon() noexcept override {}
  std::unique_ptr<Transport> split_world(int, const Deadline&) override { return nullptr; }
  bool abort(const Error&) override { return true; }

 private:
  Calls& calls_;
  Ticket next_ = 0;
  Ticket delivered_ = -1;
};

class StateRelayOfTheMiddle : public ::testing::Test {
 protected:
  StateRelayOfTheMiddle() {
    const auto carry = [this](const HeadRange& heads, int step, Stream) {
      calls_.push_back(fmt::format("carry heads {} to {}, step {}", heads.first, heads.end() - 1, step));
    };
    relay_.enter({{1}, carry}, {}, 1.0, nullptr);
  }

  // What was called since the last time.
  Calls calls() { return std::exchange(calls_, {}); }

  static SsmSpec spec() {
    SsmSpec spec;
    spec.heads = 2;
    return spec;
  }

  Calls calls_;
  const std::vector<std::int64_t> lengths_{3 * kSuperSegmentTokens};
  const StateHops hops_ = state_hops(ssm_layout(lengths_, {}, 3));
  const std::vector<HeadRange> ranges_{{0, 1}, {1, 1}};
  std::unique_ptr<Backend> backend_ = choose_kernel(spec(), {"cpu", "auto"}).row->make_backend({1, kNoDevice});
  MiddleRank transport_{calls_};
  StateExchange exchange_{spec(), hops_, ranges_, transport_, *backend_};
  StateRelay relay_{ranges_, exchange_, transport_, *backend_, Timeouts(1.0)};
};

TEST_F(StateRelayOfTheMiddle, HandsOnWhatArrivesWhileTheKernelWorks) {
  relay_.begin(0);
  EXPECT_EQ(calls(), Calls{"receive of states of heads 0 to 0, step 1 of 2"});
  relay_.advance();
  EXPECT_EQ(calls(), Calls{}) << "nothing has arrived";
  transport_.deliver(0);
  relay_.advance();
  EXPECT_EQ(calls(),
            (Calls{"wait for 0", "carry heads 0 to 0, step 1", "send of states of heads 0 to 0, step 2 of 2"}));
  relay_.advance();
  EXPECT_EQ(calls(), Calls{}) << "each is carried once";
  relay_.end();
  EXPECT_EQ(calls(), Calls{"wait for 1"});
  relay_.advance();
  EXPECT_EQ(calls(), Calls{}) << "no range is on its way";
}

TEST_F(StateRelayOfTheMiddle, WaitsWhereNothingIsLeftToDo) {
  relay_.begin(0);
  relay_.end();
  EXPECT_EQ(calls().size(), 5U);
  relay_.begin(1);
  relay_.end();
  EXPECT_EQ(calls(),
            (Calls{"receive of states of heads 1 to 1, step 1 of 2", "wait for 2", "carry heads 1 to 1, step 1",
                   "send of states of heads 1 to 1, step 2 of 2", "wait for 3"}));
}

}  // namespace
}  // namespace ringattn::testing
