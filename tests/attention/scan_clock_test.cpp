// SPDX-License-Identifier: Apache-2.0
// A scan waits for states while it neither folds nor finishes any heads.
#include "attention/scan_clock.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/still_backend.hpp"

namespace ringattn::testing {
namespace {

using Kind = ScanPart::Kind;

// A stream whose marks are passed when the test says so; its handle is the time.
class GivenTimes final : public Marks {
 public:
  explicit GivenTimes(std::size_t count) : times_(count) {}

  void record(std::size_t mark, Stream stream) override {
    times_.at(mark) = *static_cast<const double*>(stream.handle);
  }
  void synchronize(std::size_t, const Deadline&, const Progress&) override {}
  double elapsed(std::size_t from, std::size_t to) override { return times_.at(to) - times_.at(from); }

 private:
  std::vector<double> times_;
};

class TimedBackend final : public StillBackend {
 public:
  std::unique_ptr<Marks> make_marks(std::size_t count, bool) override { return std::make_unique<GivenTimes>(count); }
};

class TwoRanges {
 public:
  explicit TwoRanges(bool timeline, std::size_t waits = 2) : clock_(backend_, 2, waits, timeline) {}

  void part(Kind kind, int range, double begin, double end) {
    clock_.begin_part(kind, {range, 1}, {&begin});
    clock_.end_part(kind, {&end});
  }
  ScanStats stats_of(double end) {
    clock_.end({&end});
    return clock_.stats();
  }
  void begin() {
    double at = 10.0;
    clock_.begin({&at});
  }

 private:
  TimedBackend backend_;
  ScanClock clock_;
};

std::vector<std::string> texts(const std::vector<ScanPart>& parts) {
  constexpr const char* kNames[] = {"fold", "wait", "finish", "travel"};
  std::vector<std::string> all;
  for (const ScanPart& part : parts) {
    all.push_back(
        fmt::format("{} {}: {} to {}", kNames[static_cast<int>(part.kind)], part.heads.first, part.begin, part.end));
  }
  return all;
}

// The second range is folded while the states of the first travel, and waits a second that nothing fills.
TEST(ScanClock, CountsWaitsThatTheOtherRangeDoesNotFill) {
  for (const bool timeline : {true, false}) {
    TwoRanges ranges(timeline);
    for (int round = 0; round < 2; ++round) {
      ranges.begin();
      ranges.part(Kind::kFold, 0, 10, 12);
      ranges.part(Kind::kFold, 1, 10, 14);
      ranges.part(Kind::kTravel, 0, 12, 15);
      ranges.part(Kind::kWait, 0, 12, 15);
      ranges.part(Kind::kFinish, 0, 15, 18);
      ranges.part(Kind::kWait, 1, 14, 20);
      ranges.part(Kind::kFinish, 1, 20, 23);
      const ScanStats stats = ranges.stats_of(23);
      EXPECT_EQ(stats.seconds, 13.0);
      // Of each range from 14 to 15, and of the second from 18 to 20.
      EXPECT_EQ(stats.waiting_seconds, 3.0);
      const std::vector<std::string> expected{"fold 0: 0 to 2",  "fold 1: 0 to 4",    "travel 0: 2 to 5",
                                              "wait 0: 4 to 5",  "wait 1: 4 to 5",    "finish 0: 5 to 8",
                                              "wait 1: 8 to 10", "finish 1: 10 to 13"};
      EXPECT_EQ(texts(stats.parts), timeline ? expected : std::vector<std::string>{});
    }
  }
}

TEST(ScanClock, MarksNothingInsideOfAScanThatNeverWaits) {
  TwoRanges ranges(false, 0);
  ranges.begin();
  ranges.part(Kind::kFold, 0, 10, 12);
  ranges.part(Kind::kFinish, 0, 12, 14);
  const ScanStats stats = ranges.stats_of(15);
  EXPECT_EQ(stats.seconds, 5.0);
  EXPECT_EQ(stats.waiting_seconds, 0.0);
  EXPECT_TRUE(stats.parts.empty());
}

TEST(IdleParts, AreWhatIsLeftOfAWait) {
  const ScanPart wait{Kind::kWait, {0, 1}, 2.0, 6.0};
  const auto left = [&](const std::vector<ScanPart>& parts) { return texts(idle_parts(wait, parts)); };
  const auto work = [](Kind kind, double begin, double end) { return ScanPart{kind, {1, 1}, begin, end}; };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(left({}), Texts{"wait 0: 2 to 6"});
  EXPECT_EQ(left({work(Kind::kTravel, 0, 9), work(Kind::kWait, 0, 9)}), Texts{"wait 0: 2 to 6"}) << "they fill nothing";
  EXPECT_EQ(left({work(Kind::kFold, 0, 2), work(Kind::kFinish, 6, 9)}), Texts{"wait 0: 2 to 6"}) << "they touch it";
  EXPECT_EQ(left({work(Kind::kFold, 3, 4), work(Kind::kFinish, 5, 9)}), (Texts{"wait 0: 2 to 3", "wait 0: 4 to 5"}));
  EXPECT_EQ(left({work(Kind::kFold, 0, 4), work(Kind::kFinish, 3, 9)}), Texts{});
  const ScanPart none{Kind::kWait, {0, 1}, 4.0, 4.0};
  EXPECT_EQ(idle_parts(none, {work(Kind::kFold, 0, 4)}).size(), 1U);
}

}  // namespace
}  // namespace ringattn::testing
