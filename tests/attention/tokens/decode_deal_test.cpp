// SPDX-License-Identifier: Apache-2.0
// How ranks deal a decode step: what each keeps is all of it, once, and holds what it owns.
#include "attention/tokens/decode_deal.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/attention/attention_spec.hpp"

namespace ringattn {
namespace {

AttentionSpec listed_spec(int kv_heads, int mask_heads) {
  AttentionSpec spec = make_spec(Dtype::kBf16, 4 * kv_heads, kv_heads, 64, {-1, 0});
  spec.block_mask = {128, 128, mask_heads};
  return spec;
}

DecodeDeal dealt(int kv_heads, int mask_heads, std::int64_t sequences, int ranks, bool chooses = false) {
  return deal_decode(listed_spec(kv_heads, mask_heads), chooses, sequences, ranks);
}

TEST(DecodeDeal, DealsKvSplitsWithoutABlockMask) {
  for (const int ranks : {1, 2, 5}) {
    EXPECT_EQ(deal_decode(make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0}), false, 3, ranks), (DecodeDeal{1, 1, ranks}));
  }
}

// Among equally good deals, the one with the fewest parts of heads is taken: dealing by sequences sends nothing.
TEST(DecodeDeal, DealsSequencesOrHeadsWithABlockMask) {
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int mask_heads : {1, 8}) {
      EXPECT_EQ(dealt(8, mask_heads, 1, ranks), (DecodeDeal{1, ranks, 1}));
      EXPECT_EQ(dealt(8, mask_heads, 256, ranks), (DecodeDeal{ranks, 1, 1}));
    }
  }
  EXPECT_EQ(dealt(8, 8, 1, 3), (DecodeDeal{1, 3, 1}));  // 3, 3 and 2 heads
  EXPECT_EQ(dealt(8, 8, 4, 8), (DecodeDeal{4, 2, 1}));  // one sequence's 4 heads each
  EXPECT_EQ(dealt(8, 8, 9, 8), (DecodeDeal{1, 8, 1}));  // a head of 9 sequences is less than 2 whole ones
  EXPECT_EQ(dealt(8, 8, 129, 8),
            (DecodeDeal{8, 1, 1}));                      // 17 whole sequences are less than a tenth more than 129 heads
  EXPECT_EQ(dealt(8, 8, 1, 16), (DecodeDeal{2, 8, 1}));  // half of the ranks have nothing
  EXPECT_EQ(dealt(1, 1, 1, 4), (DecodeDeal{4, 1, 1}));
  // Heads that share one of several masks stay together; so do all where one mask is selected by their scores.
  EXPECT_EQ(dealt(8, 2, 1, 4), (DecodeDeal{2, 2, 1}));
  EXPECT_EQ(dealt(8, 1, 1, 4, true), (DecodeDeal{4, 1, 1}));
  EXPECT_EQ(dealt(8, 8, 1, 4, true), (DecodeDeal{1, 4, 1}));
}

TEST(DecodeDeal, GoesByWhatThereIsToAttend) {
  const auto dealt_by = [](std::int64_t sequences, std::int64_t heads) {
    return deal_decode(listed_spec(8, 8), false, 4, [&](const DecodeDeal& deal) {
      return deal.heads == 4 ? heads : deal.heads == 2 ? 95 : sequences;
    });
  };
  EXPECT_EQ(dealt_by(100, 90), (DecodeDeal{1, 4, 1}));
  EXPECT_EQ(dealt_by(100, 91), (DecodeDeal{4, 1, 1}));
  EXPECT_EQ(dealt_by(200, 86), (DecodeDeal{2, 2, 1}));
}

TEST(DecodeDeal, EverythingIsKeptOnceAndByItsOwner) {
  for (const int kv_heads : {1, 2, 3, 8}) {
    for (const int mask_heads : {1, kv_heads / 2, kv_heads}) {
      if (mask_heads < 1 || kv_heads % mask_heads != 0) continue;
      const AttentionSpec spec = listed_spec(kv_heads, mask_heads);
      for (std::int64_t sequences = 1; sequences <= 9; ++sequences) {
        for (int ranks = 1; ranks <= 16; ++ranks) {
          const DecodeDeal deal = deal_decode(spec, false, sequences, ranks);
          ASSERT_EQ(deal.ranks(), ranks);
          std::vector<int> kept(static_cast<std::size_t>(sequences * kv_heads));
          std::int64_t max_sequences = 0;
          int max_heads = 0;
          for (int rank = 0; rank < ranks; ++rank) {
            const SequenceRange own = owned_sequences(sequences, rank, ranks);
            const SequenceRange part = kept_sequences(deal, sequences, rank);
            const HeadRange heads = kept_heads(deal, spec, rank);
            EXPECT_TRUE(own.count == 0 || (part.first <= own.first && own.end() <= part.end()));
            EXPECT_EQ(kept_sequences(deal, sequences, first_of_part(deal, rank)), part);
            EXPECT_GE(heads.count, 1);
            EXPECT_TRUE(kept_partition(deal, rank).is_whole());
            const AttentionSpec of = spec_of_heads(spec, heads);
            EXPECT_EQ(of.heads, 4 * of.kv_heads);
            EXPECT_EQ(of.kv_heads % of.block_mask.heads, 0);
            EXPECT_TRUE(mask_heads == 1 || of.kv_heads / of.block_mask.heads == kv_heads / mask_heads);
            EXPECT_EQ(query_heads(spec, heads).first, 4 * heads.first);
            for (std::int64_t s = part.first; s < part.end(); ++s) {
              for (int head = heads.first; head < heads.end(); ++head) {
                ++kept[static_cast<std::size_t>(s * kv_heads + head)];
              }
            }
            max_sequences = std::max(max_sequences, part.count);
            max_heads = std::max(max_heads, heads.count);
          }
          EXPECT_TRUE(std::ranges::all_of(kept, [](int times) { return times == 1; }))
              << kv_heads << " heads, " << mask_heads << " mask_heads, " << sequences << " sequences, " << ranks
              << " ranks";
          EXPECT_EQ(kept_sequences(deal, sequences, ranks - 1).count, max_sequences);
          EXPECT_EQ(kept_heads(deal, spec, ranks - 1).count, max_heads);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn
