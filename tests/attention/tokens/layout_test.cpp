// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "tests/attention/ring/random_job.hpp"
#include "tests/support/environment.hpp"

namespace ringattn::testing {
namespace {

using Runs = std::vector<std::vector<TokenRun>>;

constexpr int kKeyTile = 128;

Job job_of(Batch batch, Mask mask = {-1, 0}) {
  Job job;
  job.spec.mask = mask;
  job.batch = std::move(batch);
  return job;
}

Runs runs_of(const Layout& layout) {
  Runs runs;
  for (int rank = 0; rank < layout.world(); ++rank) {
    runs.emplace_back(layout.runs(rank).begin(), layout.runs(rank).end());
  }
  return runs;
}

std::string refusal_of_layout(std::vector<std::int64_t> lengths, Runs runs) {
  try {
    Layout(lengths, std::move(runs));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return {};
}

// Sum over the rows of a rank of the keys that each sees.
double work_of(const Job& job, const Layout& queries, int rank) {
  double pairs = 0.0;
  for (const TokenRun& run : queries.runs(rank)) {
    const Sequence& s = job.batch.sequences[static_cast<std::size_t>(run.sequence)];
    pairs += Visibility(job.spec.mask, s.k_len).pairs(s.q_offset + run.begin, run.tokens());
  }
  return pairs;
}

TEST(Layout, StripesAreDealtLikeASnake) {
  const JobLayout layout = make_layout(job_of(uniform_batch(1, 950, 950)), 3, {LayoutKind::kStriped, 100}, 1, kKeyTile);
  const Runs expected = {
      {{0, 0, 100}, {0, 500, 700}},  // stripes 0, 5, 6: neighbours are joined
      {{0, 100, 200}, {0, 400, 500}, {0, 700, 800}},
      {{0, 200, 400}, {0, 800, 950}},  // the last stripe is short
  };
  EXPECT_EQ(runs_of(layout.keys), expected);
  EXPECT_EQ(runs_of(layout.queries), expected);
  EXPECT_EQ(layout.request.stripe, 100);
}

TEST(Layout, TheDealGoesOnFromSequenceToSequence) {
  const JobLayout layout = make_layout(job_of(uniform_batch(2, 30, 30)), 4, {LayoutKind::kStriped, 10}, 1, kKeyTile);
  const Runs expected = {{{0, 0, 10}}, {{0, 10, 20}}, {{0, 20, 30}, {1, 20, 30}}, {{1, 0, 20}}};
  EXPECT_EQ(runs_of(layout.keys), expected);
}

TEST(Layout, StripedUsesTheLeastCommonMultipleOfTheTiles) {
  EXPECT_EQ(make_layout(job_of(uniform_batch(1, 9000, 9000)), 2, {}, 64, 128).request.stripe, 128);
  EXPECT_EQ(make_layout(job_of(uniform_batch(1, 9000, 9000)), 2, {}, 192, 128).request.stripe, 384);
}

TEST(Layout, ZigzagHasTwoStripesARank) {
  const JobLayout layout = make_layout(job_of(uniform_batch(1, 2048, 2048)), 4, {LayoutKind::kZigzag, 0}, 1, kKeyTile);
  const Runs expected = {{{0, 0, 256}, {0, 1792, 2048}},
                         {{0, 256, 512}, {0, 1536, 1792}},
                         {{0, 512, 768}, {0, 1280, 1536}},
                         {{0, 768, 1280}}};
  EXPECT_EQ(runs_of(layout.keys), expected);
  EXPECT_EQ(layout.request.stripe, 256);
}

TEST(Layout, ContiguousKeepsTokenOrder) {
  // Each sequence starts with rank 0; lengths that divide nothing are rounded up to tiles.
  const Job job = job_of(uniform_batch(2, 1000, 1000));
  const JobLayout layout = make_layout(job, 3, {LayoutKind::kContiguous, 0}, 1, kKeyTile);
  const Runs expected = {{{0, 0, 384}, {1, 0, 384}}, {{0, 384, 768}, {1, 384, 768}}, {{0, 768, 1000}, {1, 768, 1000}}};
  EXPECT_EQ(runs_of(layout.keys), expected);
  EXPECT_EQ(runs_of(layout.queries), expected);
}

TEST(Layout, MoreRanksThanStripesLeavesRanksEmpty) {
  const JobLayout layout = make_layout(job_of(uniform_batch(1, 1, 1)), 1024, {}, 1, kKeyTile);
  EXPECT_EQ(layout.keys.tokens(0), 1);
  for (int rank = 1; rank < 1024; ++rank) EXPECT_EQ(layout.keys.tokens(rank), 0);
}

TEST(Layout, QueriesOfAnotherLengthAreDealtOnTheirOwn) {
  // A chunk of 256 queries after a cached prefix.
  const JobLayout layout = make_layout(job_of({{256, 1024, 768}}), 2, {LayoutKind::kStriped, 128}, 1, kKeyTile);
  EXPECT_EQ(runs_of(layout.queries), (Runs{{{0, 0, 128}}, {{0, 128, 256}}}));
  EXPECT_EQ(runs_of(layout.keys), (Runs{{{0, 0, 128}, {0, 384, 640}, {0, 896, 1024}}, {{0, 128, 384}, {0, 640, 896}}}));
}

TEST(Layout, ShortSequencesLiveWholeOnTheLeastLoadedRank) {
  // One long sequence and a hundred short ones: the short ones are not cut, and every rank has the same work.
  constexpr double kTolerance = 0.01;
  std::vector<Sequence> sequences{{32768, 32768, 0}};
  for (std::int64_t i = 0; i < 100; ++i) sequences.push_back({200 + 7 * i, 200 + 7 * i, 0});
  const Job job = job_of(sequences);
  const JobLayout layout = make_layout(job, 8, {}, 1, kKeyTile);
  const double mean = visible_pairs(job) / 8;
  std::vector<int> owner(sequences.size(), -1);
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_NEAR(work_of(job, layout.queries, rank), mean, kTolerance * mean);
    for (const TokenRun& run : layout.keys.runs(rank)) {
      if (run.sequence == 0) continue;
      EXPECT_EQ(run.tokens(), sequences[static_cast<std::size_t>(run.sequence)].k_len);
    }
  }
  EXPECT_EQ(runs_of(layout.keys), runs_of(layout.queries));
}

TEST(Layout, AWholeSequenceHasKeysAndQueriesOnOneRank) {
  std::vector<Sequence> sequences(64, Sequence{40, 100, 60});
  const JobLayout layout = make_layout(job_of(sequences), 8, {}, 1, kKeyTile);
  for (int rank = 0; rank < 8; ++rank) {
    ASSERT_EQ(layout.keys.runs(rank).size(), 8U);
    ASSERT_EQ(layout.queries.runs(rank).size(), 8U);
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(layout.keys.runs(rank)[i].sequence, layout.queries.runs(rank)[i].sequence);
      EXPECT_EQ(layout.keys.runs(rank)[i].tokens(), 100);
      EXPECT_EQ(layout.queries.runs(rank)[i].tokens(), 40);
    }
  }
}

TEST(Layout, ShortSequencesFillBinsEvenly) {
  constexpr double kTolerance = 0.01;
  std::vector<Sequence> sequences;
  for (std::int64_t i = 0; i < 100; ++i) sequences.push_back({200 + 7 * i, 200 + 7 * i, 0});
  const Job job = job_of(sequences);
  const JobLayout layout = make_layout(job, 8, {}, 1, kKeyTile);
  const double mean = visible_pairs(job) / 8;
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_NEAR(work_of(job, layout.queries, rank), mean, kTolerance * mean);
  }
}

TEST(Layout, ASequenceOfManyQueriesOrKeysIsSplit) {
  std::vector<Sequence> sequences(64, Sequence{2000, 2000, 0});
  sequences[0] = {9000, 10, 0};
  sequences[1] = {10, 9000, 0};
  const JobLayout layout = make_layout(job_of(sequences), 8, {}, 1, kKeyTile);
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(layout.queries.runs(rank)[0].sequence, 0);
    const auto keys = layout.keys.runs(rank);
    EXPECT_TRUE(std::any_of(keys.begin(), keys.end(), [](const TokenRun& run) { return run.sequence == 1; }));
  }
}

TEST(Layout, FewSequencesAreAlwaysSplit) {
  // Short by their stripes, but each is more than a quarter of a rank's share.
  const JobLayout layout = make_layout(job_of(uniform_batch(2, 512, 512)), 8, {}, 1, kKeyTile);
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(layout.keys.tokens(rank), 128);
}

TEST(Layout, CausalWorkIsEqualOnAllRanks) {
  constexpr double kTolerance = 0.005;
  const Job job = job_of(uniform_batch(1, 65536, 65536));
  for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag}) {
    const JobLayout layout = make_layout(job, 8, {kind, 0}, 1, kKeyTile);
    for (int rank = 0; rank < 8; ++rank) {
      EXPECT_NEAR(work_of(job, layout.queries, rank), visible_pairs(job) / 8, kTolerance * visible_pairs(job) / 8)
          << layout_name(kind) << " rank " << rank;
    }
  }
}

TEST(Layout, AppendingToASequenceMovesNothing) {
  const auto striped = [](std::int64_t tokens) {
    return make_layout(job_of(uniform_batch(1, tokens, tokens)), 5, {}, 1, kKeyTile);
  };
  const JobLayout before = striped(10000);
  const JobLayout after = striped(12345);
  for (int rank = 0; rank < 5; ++rank) {
    const std::vector<std::int64_t> old_rows = before.keys.packed_tokens(rank);
    const std::vector<std::int64_t> new_rows = after.keys.packed_tokens(rank);
    ASSERT_LE(old_rows.size(), new_rows.size());
    EXPECT_TRUE(std::equal(old_rows.begin(), old_rows.end(), new_rows.begin()));
  }
}

TEST(Layout, RefusesRequestsThatMakeNoSense) {
  const Job job = job_of(uniform_batch(1, 10, 10));
  EXPECT_THROW(make_layout(job, 0, {}, 1, kKeyTile), Error);
  EXPECT_THROW(make_layout(job, 2, {LayoutKind::kStriped, -1}, 1, kKeyTile), Error);
}

TEST(Layout, StatedRunsAreChecked) {
  EXPECT_EQ(refusal_of_layout({10}, {{{0, 0, 4}, {0, 4, 6}}, {{0, 6, 10}}}), "");
  EXPECT_EQ(refusal_of_layout({}, {{}}), "");
  EXPECT_EQ(refusal_of_layout({10}, {}),
            "a layout of no ranks (a world has at least one). State one list of runs for each rank.");
  EXPECT_EQ(refusal_of_layout({10}, {{{1, 0, 4}}}),
            "rank 0 states tokens [0, 4) of sequence 1 (the job has 1 sequence). Sequences count from 0.");
  EXPECT_EQ(refusal_of_layout({10}, {{{-1, 0, 4}}}),
            "rank 0 states tokens [0, 4) of sequence -1 (the job has 1 sequence). Sequences count from 0.");
  EXPECT_EQ(refusal_of_layout({10}, {{}, {{0, 0, 11}}}),
            "rank 1 states tokens [0, 11) of sequence 0 (a run holds at least one of the sequence's 10 tokens). "
            "State [begin, end) with 0 <= begin < end, and leave empty runs out.");
  EXPECT_EQ(refusal_of_layout({10}, {{{0, -1, 10}}}),
            "rank 0 states tokens [-1, 10) of sequence 0 (a run holds at least one of the sequence's 10 tokens). "
            "State [begin, end) with 0 <= begin < end, and leave empty runs out.");
  EXPECT_EQ(refusal_of_layout({10}, {{{0, 4, 4}}}),
            "rank 0 states tokens [4, 4) of sequence 0 (a run holds at least one of the sequence's 10 tokens). "
            "State [begin, end) with 0 <= begin < end, and leave empty runs out.");
  EXPECT_EQ(refusal_of_layout({10}, {{{0, 5, 10}, {0, 0, 5}}}),
            "rank 0 states tokens [0, 5) of sequence 0 (after tokens up to 10 of sequence 0). Runs ascend by sequence "
            "and token.");
  EXPECT_EQ(refusal_of_layout({10}, {{{0, 0, 6}, {0, 4, 10}}}),
            "rank 0 states tokens [4, 10) of sequence 0 (after tokens up to 6 of sequence 0). Runs ascend by sequence "
            "and token.");
  EXPECT_EQ(refusal_of_layout({10, 10}, {{{1, 0, 10}, {0, 0, 10}}}),
            "rank 0 states tokens [0, 10) of sequence 0 (after tokens up to 10 of sequence 1). Runs ascend by sequence "
            "and token.");
  EXPECT_EQ(
      refusal_of_layout({10}, {{{0, 0, 6}}, {{0, 5, 10}}}),
      "token 5 of sequence 0 belongs to two ranks (ranks 0 and 1 state it). State each token on exactly one rank.");
  EXPECT_EQ(refusal_of_layout({10}, {{{0, 0, 5}}, {{0, 6, 10}}}),
            "token 5 of sequence 0 belongs to no rank (the runs of all ranks together hold every token). State each "
            "token on exactly one rank.");
  EXPECT_EQ(refusal_of_layout({10, 0, 7}, {{{0, 0, 10}}, {{2, 1, 7}}}),
            "token 0 of sequence 2 belongs to no rank (the runs of all ranks together hold every token). State each "
            "token on exactly one rank.");
  EXPECT_EQ(refusal_of_layout({10, 7}, {{{0, 0, 10}}, {}}),
            "token 0 of sequence 1 belongs to no rank (the runs of all ranks together hold every token). State each "
            "token on exactly one rank.");
}

// Over random jobs: each token on one rank, the lists agree with each other, and unshard undoes shard.
TEST(LayoutProperty, EveryTokenHasOnePlace) {
  const auto check = [](const Layout& layout, std::int64_t tokens, std::uint64_t seed) {
    SCOPED_TRACE("RINGATTN_TEST_SEED=" + std::to_string(seed));
    constexpr std::int64_t kTokenBytes = sizeof(std::int64_t);
    std::vector<std::int64_t> packed(static_cast<std::size_t>(tokens));
    std::iota(packed.begin(), packed.end(), 0);
    std::vector<std::int64_t> back(packed.size(), -1);
    std::int64_t owned = 0;
    for (int rank = 0; rank < layout.world(); ++rank) {
      const std::vector<std::int64_t> expected = layout.packed_tokens(rank);
      const std::vector<std::int64_t> positions = layout.positions(rank);
      ASSERT_EQ(static_cast<std::int64_t>(expected.size()), layout.tokens(rank));
      ASSERT_EQ(positions.size(), expected.size());
      std::vector<std::int64_t> rows(expected.size());
      layout.shard(rank, reinterpret_cast<const std::byte*>(packed.data()), reinterpret_cast<std::byte*>(rows.data()),
                   kTokenBytes);
      EXPECT_EQ(rows, expected);
      EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
      for (std::size_t row = 0; row < rows.size(); ++row) {
        const auto sequence = std::upper_bound(layout.cu().begin(), layout.cu().end(), rows[row]);
        ASSERT_EQ(positions[row], rows[row] - *std::prev(sequence));
        ASSERT_EQ(layout.rows_before(rank, rows[row]), static_cast<std::int64_t>(row));
        ASSERT_EQ(layout.rows_before(rank, rows[row] + 1), static_cast<std::int64_t>(row) + 1);
      }
      layout.unshard(rank, reinterpret_cast<const std::byte*>(rows.data()), reinterpret_cast<std::byte*>(back.data()),
                     kTokenBytes);
      owned += layout.tokens(rank);
    }
    EXPECT_EQ(owned, tokens);
    EXPECT_EQ(back, packed);
    for (const OwnedRun& run : layout.owners()) {
      ASSERT_EQ(layout.rows_before(run.owner, run.token), run.row);
    }
  };
  const std::uint64_t count = long_tests() ? 10000 : 1000;
  const std::uint64_t first = replayed_seed().value_or(1);
  for (std::uint64_t seed = first; seed < (replayed_seed() ? first + 1 : count) && !HasFailure(); ++seed) {
    const RandomJob random = random_job(seed, 600, 40);
    for (const JobLayout& layout : {random.layout(), stated_layout(random.job, random.world, seed)}) {
      check(layout.queries, random.job.batch.q_tokens(), seed);
      check(layout.keys, random.job.batch.k_tokens(), seed);
    }
    // The same runs for both sides where both are equally long.
    const JobLayout layout = random.layout();
    for (int rank = 0; rank < random.world; ++rank) {
      for (const TokenRun& run : layout.keys.runs(rank)) {
        const Sequence& s = random.job.batch.sequences[static_cast<std::size_t>(run.sequence)];
        if (s.q_len != s.k_len) continue;
        const auto queries = layout.queries.runs(rank);
        ASSERT_NE(std::find(queries.begin(), queries.end(), run), queries.end()) << "RINGATTN_TEST_SEED=" << seed;
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
