// SPDX-License-Identifier: Apache-2.0
// How ranks deal a decoding step: what each keeps is all of it, once, and holds what it owns.
#include "attention/tokens/step_deal.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/fold_spec.hpp"

namespace ringattn {
namespace {

FoldSpec listed_spec(int kv_heads, int lists) {
  FoldSpec spec = make_spec(Dtype::kBf16, 4 * kv_heads, kv_heads, 64, {-1, 0});
  spec.lists = {128, 128, lists};
  return spec;
}

StepDeal dealt(int kv_heads, int lists, std::int64_t sequences, int ranks, bool chooses = false) {
  return deal_step(listed_spec(kv_heads, lists), chooses, sequences, ranks);
}

TEST(StepDeal, DealsGroupsWithoutLists) {
  for (const int ranks : {1, 2, 5}) {
    EXPECT_EQ(deal_step(make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0}), false, 3, ranks), (StepDeal{1, 1, ranks}));
  }
}

// Of equally good ways the one with fewest parts of heads: for sequences nothing has to travel.
TEST(StepDeal, DealsSequencesOrHeadsWithLists) {
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int lists : {1, 8}) {
      EXPECT_EQ(dealt(8, lists, 1, ranks), (StepDeal{1, ranks, 1}));
      EXPECT_EQ(dealt(8, lists, 256, ranks), (StepDeal{ranks, 1, 1}));
    }
  }
  EXPECT_EQ(dealt(8, 8, 1, 3), (StepDeal{1, 3, 1}));    // 3, 3 and 2 heads
  EXPECT_EQ(dealt(8, 8, 4, 8), (StepDeal{4, 2, 1}));    // one sequence's 4 heads each
  EXPECT_EQ(dealt(8, 8, 9, 8), (StepDeal{1, 8, 1}));    // a head of 9 sequences is less than 2 whole ones
  EXPECT_EQ(dealt(8, 8, 129, 8), (StepDeal{8, 1, 1}));  // 17 whole sequences are less than a tenth more than 129 heads
  EXPECT_EQ(dealt(8, 8, 1, 16), (StepDeal{2, 8, 1}));   // half of the ranks have nothing
  EXPECT_EQ(dealt(1, 1, 1, 4), (StepDeal{4, 1, 1}));
  // Heads that share one of several lists stay together; so do all where one list is chosen by their scores.
  EXPECT_EQ(dealt(8, 2, 1, 4), (StepDeal{2, 2, 1}));
  EXPECT_EQ(dealt(8, 1, 1, 4, true), (StepDeal{4, 1, 1}));
  EXPECT_EQ(dealt(8, 8, 1, 4, true), (StepDeal{1, 4, 1}));
}

TEST(StepDeal, GoesByWhatThereIsToFold) {
  const auto dealt_by = [](std::int64_t sequences, std::int64_t heads) {
    return deal_step(listed_spec(8, 8), false, 4, [&](const StepDeal& deal) {
      return deal.heads == 4 ? heads : deal.heads == 2 ? 95 : sequences;
    });
  };
  EXPECT_EQ(dealt_by(100, 90), (StepDeal{1, 4, 1}));
  EXPECT_EQ(dealt_by(100, 91), (StepDeal{4, 1, 1}));
  EXPECT_EQ(dealt_by(200, 86), (StepDeal{2, 2, 1}));
}

TEST(StepDeal, EverythingIsKeptOnceAndByItsOwner) {
  for (const int kv_heads : {1, 2, 3, 8}) {
    for (const int lists : {1, kv_heads / 2, kv_heads}) {
      if (lists < 1 || kv_heads % lists != 0) continue;
      const FoldSpec spec = listed_spec(kv_heads, lists);
      for (std::int64_t sequences = 1; sequences <= 9; ++sequences) {
        for (int ranks = 1; ranks <= 16; ++ranks) {
          const StepDeal deal = deal_step(spec, false, sequences, ranks);
          ASSERT_EQ(deal.ranks(), ranks);
          std::vector<int> kept(static_cast<std::size_t>(sequences * kv_heads));
          std::int64_t most_sequences = 0;
          int most_heads = 0;
          for (int rank = 0; rank < ranks; ++rank) {
            const SequenceRange own = owned_sequences(sequences, rank, ranks);
            const SequenceRange part = kept_sequences(deal, sequences, rank);
            const HeadRange heads = kept_heads(deal, spec, rank);
            EXPECT_TRUE(own.count == 0 || (part.first <= own.first && own.end() <= part.end()));
            EXPECT_EQ(kept_sequences(deal, sequences, first_of_part(deal, rank)), part);
            EXPECT_GE(heads.count, 1);
            EXPECT_TRUE(kept_share(deal, rank).is_whole());
            const FoldSpec of = spec_of_heads(spec, heads);
            EXPECT_EQ(of.heads, 4 * of.kv_heads);
            EXPECT_EQ(of.kv_heads % of.lists.heads, 0);
            EXPECT_TRUE(lists == 1 || of.kv_heads / of.lists.heads == kv_heads / lists);
            EXPECT_EQ(query_heads(spec, heads).first, 4 * heads.first);
            for (std::int64_t s = part.first; s < part.end(); ++s) {
              for (int head = heads.first; head < heads.end(); ++head) {
                ++kept[static_cast<std::size_t>(s * kv_heads + head)];
              }
            }
            most_sequences = std::max(most_sequences, part.count);
            most_heads = std::max(most_heads, heads.count);
          }
          EXPECT_TRUE(std::ranges::all_of(kept, [](int times) { return times == 1; }))
              << kv_heads << " heads, " << lists << " lists, " << sequences << " sequences, " << ranks << " ranks";
          EXPECT_EQ(kept_sequences(deal, sequences, ranks - 1).count, most_sequences);
          EXPECT_EQ(kept_heads(deal, spec, ranks - 1).count, most_heads);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn
