// SPDX-License-Identifier: Apache-2.0
// The ranges of a scan have streams that are behind what the caller's stream has had, and that it waits for, whatever
// happens in between.
#include "attention/range_streams.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/still_backend.hpp"

namespace ringattn::testing {
namespace {

using Calls = std::vector<std::string>;

// Streams are numbered: the caller's is 0, others follow as they are made.
struct Named {
  int number = 0;
};

int number_of(Stream stream) { return static_cast<const Named*>(stream.handle)->number; }

class NotedStream final : public StreamBeside {
 public:
  NotedStream(Calls& calls, int number) : calls_(calls), name_{number} {}

  Stream stream() override { return {&name_}; }
  void record(std::size_t mark, Stream stream) override {
    calls_.push_back(fmt::format("mark {} of {}: what {} has", mark, name_.number, number_of(stream)));
  }
  void follow(std::size_t mark, Stream stream) override {
    calls_.push_back(fmt::format("mark {} of {}: {} follows", mark, name_.number, number_of(stream)));
  }

 private:
  Calls& calls_;
  Named name_;
};

class NotedBackend final : public StillBackend {
 public:
  explicit NotedBackend(Calls& calls) : calls_(calls) {}

  std::unique_ptr<StreamBeside> make_stream_beside(Turn turn, std::size_t marks) override {
    EXPECT_EQ(turn, Turn::kInArrival) << "a range doesn't overtake the one before";
    EXPECT_EQ(marks, 2U);
    return std::make_unique<NotedStream>(calls_, ++made_);
  }
  int made() const { return made_; }

 private:
  Calls& calls_;
  int made_ = 0;
};

class RangesOfADevice : public ::testing::Test {
 protected:
  Calls calls_;
  NotedBackend backend_{calls_};
  Named callers_;
};

TEST_F(RangesOfADevice, ForkFromTheCallersStreamAndJoinIt) {
  RangeStreams streams(backend_, 3);
  for (int round = 0; round < 2; ++round) {
    streams.run({&callers_}, [&] {
      for (std::size_t range = 0; range < 3; ++range) {
        calls_.push_back(fmt::format("range {} in {}", range, number_of(streams.of(range))));
      }
    });
    EXPECT_EQ(
        std::exchange(calls_, {}),
        (Calls{"mark 0 of 1: what 0 has", "mark 0 of 1: 1 follows", "mark 0 of 2: what 0 has", "mark 0 of 2: 2 follows",
               "range 0 in 0", "range 1 in 1", "range 2 in 2", "mark 1 of 1: what 1 has", "mark 1 of 1: 0 follows",
               "mark 1 of 2: what 2 has", "mark 1 of 2: 0 follows"}));
  }
}

TEST_F(RangesOfADevice, JoinAfterAFailure) {
  RangeStreams streams(backend_, 2);
  EXPECT_THROW(streams.run({&callers_}, [] { throw std::runtime_error("no"); }), std::runtime_error);
  EXPECT_EQ(calls_, (Calls{"mark 0 of 1: what 0 has", "mark 0 of 1: 1 follows", "mark 1 of 1: what 1 has",
                           "mark 1 of 1: 0 follows"}));
}

TEST_F(RangesOfADevice, OfWhichThereIsOneHaveTheCallersStreamAlone) {
  RangeStreams streams(backend_, 1);
  streams.run({&callers_}, [&] { EXPECT_EQ(number_of(streams.of(0)), 0); });
  EXPECT_EQ(backend_.made(), 0);
  EXPECT_EQ(calls_, Calls{});
}

// It has no streams.
TEST(RangesOfAHost, AreTheCallersStream) {
  StillBackend backend;
  RangeStreams streams(backend, 2);
  Named callers;
  streams.run({&callers}, [&] { EXPECT_EQ(streams.of(1).handle, &callers); });
}

}  // namespace
}  // namespace ringattn::testing
