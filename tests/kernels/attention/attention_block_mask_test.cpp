// SPDX-License-Identifier: Apache-2.0
// Block masks: a full mask gives the bits of attention without a mask; other masks give the same
// bits however the work is arranged, are as accurate as attention, and let through only the blocks they name.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "base/error.hpp"
#include "kernels/attention/block_mask_patterns.hpp"
#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kListHeads[] = {1, kKvHeads, kHeads};

// Whether a block is in the mask row.
using Listed = std::function<bool(const BlockMaskRow& place, std::int64_t block)>;

BlockMaskPattern maker_of(const Listed& listed) {
  return [listed](const BlockMaskRow& place, std::vector<std::int32_t>& blocks) {
    for (std::int64_t block = 0; block < place.blocks; ++block) {
      if (listed(place, block)) blocks.push_back(static_cast<std::int32_t>(block));
    }
  };
}

// About `percent` of the blocks, other ones for each seed, head and query block.
Listed some(unsigned percent, unsigned seed) {
  return [percent, seed](const BlockMaskRow& place, std::int64_t block) {
    std::seed_seq words{seed, static_cast<unsigned>(place.sequence), static_cast<unsigned>(place.head),
                        static_cast<unsigned>(place.block), static_cast<unsigned>(block)};
    std::uint32_t word = 0;
    words.generate(&word, &word + 1);
    return word % 100 < percent;
  };
}

class AttentionBlockMask : public KernelRowTest {
 protected:
  struct Tiles {
    int query;
    int key;
  };
  Tiles tiles_of(const AttentionSpec& spec) {
    AttentionSpec dense = spec;
    dense.block_mask = {};
    AttentionRunner runner(row(), dense);
    return {runner.kernel().query_tile(), runner.kernel().key_tile()};
  }
  // Blocks of that many tiles. For a kernel without query tiles: 24 queries, no multiple of its work tiles.
  BlockMaskShape shape_of(const AttentionSpec& spec, int heads, int tiles = 1) {
    const Tiles sizes = tiles_of(spec);
    return {(sizes.query == 1 ? 24 : sizes.query) * tiles, sizes.key * tiles, heads};
  }
  static void set_block_mask(AttentionInputs& inputs, const BlockMaskShape& shape, const BlockMaskPattern& make) {
    inputs.spec.block_mask = shape;
    inputs.block_mask = std::make_shared<const BlockMask>(make_block_mask(shape, inputs.masked_sequences(), make));
  }
  static void set_block_mask(AttentionInputs& inputs, const BlockMaskShape& shape, const Listed& listed) {
    set_block_mask(inputs, shape, maker_of(listed));
  }
  AttentionResult attend(const AttentionInputs& inputs, const Arrangement& arrangement = {}) {
    return attend_with(row(), inputs, arrangement);
  }
  void expect_accurate(const AttentionInputs& inputs, const AttentionResult& result) {
    const Tiles sizes = tiles_of(inputs.spec);
    EXPECT_EQ(check_accuracy(inputs, result.out, result.lse, {sizes.query, sizes.key}), "") << describe(inputs.spec);
  }
  // One element of out and the LSE of a row, as bytes.
  static bool same_row(const AttentionInputs& inputs, const AttentionResult& a, const AttentionResult& b,
                       std::int64_t row) {
    const std::size_t bytes = static_cast<std::size_t>(inputs.spec.head_dim_v) * size_of(inputs.spec.dtype);
    const std::size_t at = static_cast<std::size_t>(row) * bytes;
    return std::memcmp(a.out.data() + at, b.out.data() + at, bytes) == 0 &&
           std::memcmp(&a.lse[static_cast<std::size_t>(row)], &b.lse[static_cast<std::size_t>(row)], sizeof(float)) ==
               0;
  }
};

const std::vector<SequenceShape> kRagged = {{300, 300, 0}, {1, 1, 0},  {0, 0, 0},    {70, 700, 630},
                                            {90, 40, 13},  {64, 0, 0}, {17, 5, -12}, {129, 256, 100}};
constexpr Mask kSomeMasks[] = {{-1, 0}, {-1, -1}, {150, 0}, {100, 90}};

TEST_P(AttentionBlockMask, OfEverythingAreDenseAttention) {
  std::size_t turn = 0;
  CaseChoice cases = choose_cases(3);
  for (const Dims& dims : varied_dims(row())) {
    for (const Mask& mask : kSomeMasks) {
      if (!cases.take()) continue;
      AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, mask);
      spec.sinks = mask.left >= 0;
      AttentionInputs inputs = random_inputs(spec, kRagged, 11);
      const AttentionResult dense = attend(inputs, {.export_state = true});
      for (const int heads : {kListHeads[turn++ % std::size(kListHeads)]}) {
        set_block_mask(inputs, shape_of(spec, heads, heads), all_blocks());
        EXPECT_TRUE(attend(inputs, {.export_state = true}).same_bits(dense)) << describe(inputs.spec);
        EXPECT_TRUE(
            attend(inputs, {.tiles_per_task = 2, .run_rows = 37, .shuffle = 3, .export_state = true}).same_bits(dense))
            << describe(inputs.spec);
      }
    }
  }
}

// KV splits are those of plain attention, also where a window's first tile is not a split's first.
TEST_P(AttentionBlockMask, OfEverythingOverSeveralKvSplitsAreDenseAttention) {
  std::size_t turn = 0;
  for (const Dims& dims : usual_dims(row())) {
    ++turn;  // there are as many masks as kinds
    const std::int64_t group = std::int64_t{kTilesPerKvSplit} * tiles_of(make_spec(dims, kHeads, kKvHeads, {})).key;
    for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}, Mask{group + group / 3, 0}}) {
      const AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, mask);
      AttentionInputs inputs = random_inputs(spec, {{5, 2 * group + 70, 2 * group + 60}, {3, group, group - 3}}, 12);
      const AttentionResult dense = attend(inputs, {.export_state = true});
      for (const int heads : {kListHeads[turn++ % std::size(kListHeads)]}) {
        set_block_mask(inputs, shape_of(spec, heads), all_blocks());
        for (const std::int64_t tiles : {0, 64, 23}) {
          EXPECT_TRUE(attend(inputs, {.tiles_per_task = tiles, .export_state = true}).same_bits(dense))
              << describe(inputs.spec) << ", " << tiles << " tiles a task";
        }
      }
    }
  }
}

TEST_P(AttentionBlockMask, GiveTheSameBitsInAnyArrangement) {
  std::size_t turn = 0;
  CaseChoice cases = choose_cases(3);
  for (const Dims& dims : varied_dims(row())) {
    for (const Mask& mask : kSomeMasks) {
      if (!cases.take()) continue;
      for (const int heads : {kListHeads[turn++ % std::size(kListHeads)]}) {
        AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, mask);
        spec.softcap = mask.is_full() ? 20.0F : 0.0F;
        spec.sinks = mask.left >= 0;
        AttentionInputs inputs = random_inputs(spec, kRagged, 13);
        set_block_mask(inputs, shape_of(spec, heads, heads == 1 ? 2 : 1), some(40, 5));
        const AttentionResult expected = attend(inputs);
        expect_accurate(inputs, expected);
        for (const Arrangement& arrangement :
             {Arrangement{.tiles_per_task = 1},
              {.tiles_per_task = 2, .run_rows = 19, .shuffle = 34},
              {.threads = 3, .run_rows = 64, .shuffle = 33, .strided = true},
              {.tiles_per_task = 3, .shuffle = 83, .sources = 40},
              {.threads = 2, .separate_finish = true, .keep_state = true},
              {.tiles_per_task = 2, .shuffle = 84, .sources = 4, .odd_q = true, .odd_keys = true}}) {
          EXPECT_TRUE(attend(inputs, arrangement).same_bits(expected))
              << describe(inputs.spec) << ", tiles per task " << arrangement.tiles_per_task << ", shuffle "
              << arrangement.shuffle;
        }
      }
    }
  }
}

// Where nothing is masked, distant tiles of the mask are computed as if they followed each other: KV splits are full.
TEST_P(AttentionBlockMask, AreAttentionOverWhatTheyName) {
  CaseChoice cases = choose_cases(3);
  for (const Dims& dims : usual_dims(row())) {
    const AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, {-1, -1});
    const std::int64_t tile = tiles_of(spec).key;
    const std::int64_t all = 2 * kTilesPerKvSplit + 80;
    AttentionInputs inputs = random_inputs(spec, {{6, all * tile, 2}}, 14);
    std::vector<std::int64_t> named;
    for (std::int64_t t = 0; t < all; ++t) {
      if (t % 3 != 1) named.push_back(t);
    }
    AttentionInputs gathered = inputs;
    gathered.k.clear();
    gathered.v.clear();
    gathered.sequences[0].k_len = static_cast<std::int64_t>(named.size()) * tile;
    const auto append = [&](const std::vector<std::byte>& from, std::vector<std::byte>& to, std::int64_t t) {
      const std::size_t bytes = from.size() / static_cast<std::size_t>(all);
      const auto begin = from.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(t) * bytes);
      to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(bytes));
    };
    for (const std::int64_t t : named) {
      append(inputs.k, gathered.k, t);
      append(inputs.v, gathered.v, t);
    }
    const AttentionResult expected = attend(gathered, {.export_state = true});
    for (const int heads : kListHeads) {
      set_block_mask(inputs, shape_of(spec, heads),
                     [](const BlockMaskRow&, std::int64_t block) { return block % 3 != 1; });
      for (const std::int64_t tiles : {0, 1, 64, 50}) {
        if (!cases.take()) continue;
        EXPECT_TRUE(attend(inputs, {.tiles_per_task = tiles, .export_state = true}).same_bits(expected))
            << describe(inputs.spec) << ", " << tiles << " tiles a task";
      }
    }
  }
}

TEST_P(AttentionBlockMask, OverSeveralKvSplitsAreAccurate) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), kHeads, kKvHeads, {-1, 0});
  const std::int64_t keys = std::int64_t{3} * kTilesPerKvSplit * tiles_of(spec).key + 77;
  for (const int heads : kListHeads) {
    AttentionInputs inputs = random_inputs(spec, {{3, keys, keys - 3}}, 15);
    set_block_mask(inputs, shape_of(spec, heads), some(60, 6));
    const AttentionResult expected = attend(inputs);
    expect_accurate(inputs, expected);
    for (const std::int64_t tiles : {64, 17, 1}) {
      EXPECT_TRUE(attend(inputs, {.tiles_per_task = tiles}).same_bits(expected)) << tiles;
    }
  }
}

// The mask wins: blocks that no query of the block sees move no bit, and neither do they count.
TEST_P(AttentionBlockMask, MayNameWhatTheMaskHides) {
  const Dims dims = usual_dims(row()).front();
  const std::int64_t tile = tiles_of(make_spec(dims, kHeads, kKvHeads, {})).key;
  for (const Mask& mask : {Mask{-1, 0}, Mask{70 * tile, 0}, Mask{20 * tile, 3 * tile}}) {
    const AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, mask);
    const std::int64_t keys = 100 * tile;
    AttentionInputs inputs = random_inputs(spec, {{5, keys, 90 * tile}, {200, 300, 50}}, 16);
    for (const int heads : kListHeads) {
      const BlockMaskShape shape = shape_of(spec, heads);
      const Listed few = some(50, 7);
      set_block_mask(inputs, shape, few);
      const AttentionResult expected = attend(inputs);
      set_block_mask(inputs, shape, [&](const BlockMaskRow& place, std::int64_t block) {
        const std::int64_t first = place.block * shape.query_block;
        const KeyRange seen = Visibility(mask, place.keys).keys(first, first + shape.query_block - 1);
        const bool hidden = (block + 1) * shape.key_block <= seen.begin || block * shape.key_block >= seen.end;
        return hidden || few(place, block);
      });
      EXPECT_TRUE(attend(inputs).same_bits(expected)) << describe(inputs.spec);
    }
  }
}

TEST_P(AttentionBlockMask, OfNothingGiveNothing) {
  for (const Dims& dims : usual_dims(row())) {
    for (const bool sinks : {false, true}) {
      AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, {-1, 0});
      spec.sinks = sinks;
      AttentionInputs inputs = random_inputs(spec, {{100, 300, 200}, {70, 70, 0}}, 17);
      set_block_mask(inputs, shape_of(spec, 1), [](const BlockMaskRow&, std::int64_t) { return false; });
      for (const std::int64_t tiles : {0, 1}) {
        const AttentionResult result = attend(inputs, {.tiles_per_task = tiles});
        expect_accurate(inputs, result);
        EXPECT_EQ(std::ranges::count(result.out, std::byte{0}), static_cast<std::int64_t>(result.out.size()));
        for (std::size_t i = 0; i < result.lse.size() && !sinks; ++i) {
          EXPECT_EQ(result.lse[i], -std::numeric_limits<float>::infinity());
        }
      }
    }
  }
}

TEST_P(AttentionBlockMask, OfOneBlock) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), kHeads, kKvHeads, {-1, 0});
  for (const std::int64_t only : {0, 1, 3}) {
    for (const int heads : kListHeads) {
      AttentionInputs inputs = random_inputs(spec, {{500, 500, 0}}, 18);
      set_block_mask(inputs, shape_of(spec, heads), [&](const BlockMaskRow& place, std::int64_t block) {
        return block == (only + place.head) % place.blocks;
      });
      const AttentionResult result = attend(inputs);
      expect_accurate(inputs, result);
      EXPECT_TRUE(attend(inputs, {.tiles_per_task = 1, .run_rows = 50, .shuffle = 2}).same_bits(result));
    }
  }
}

// Blocks outside the mask are not read for the row: it may hold anything.
TEST_P(AttentionBlockMask, KeepNanOut) {
  for (const Dims& dims : usual_dims(row())) {
    const AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, {-1, 0});
    AttentionInputs inputs = random_inputs(spec, {{400, 900, 500}}, 19);
    for (const int heads : kListHeads) {
      const BlockMaskShape shape = shape_of(spec, heads);
      const auto listed = [](const BlockMaskRow&, std::int64_t block) { return block % 2 == 0; };
      set_block_mask(inputs, shape, listed);
      const AttentionResult expected = attend(inputs);
      AttentionInputs poisoned = inputs;
      for (std::int64_t key = 0; key < 900; ++key) {
        if (key / shape.key_block % 2 == 0) continue;
        for (int head = 0; head < kKvHeads; ++head) {
          for (int dim = 0; dim < spec.head_dim; ++dim) poisoned.set_k(key, head, dim, kNan);
          for (int dim = 0; dim < spec.head_dim_v; ++dim) poisoned.set_v(key, head, dim, kNan);
        }
      }
      EXPECT_TRUE(attend(poisoned).same_bits(expected)) << describe(inputs.spec);
      EXPECT_TRUE(attend(poisoned, {.tiles_per_task = 2, .run_rows = 70, .shuffle = 4}).same_bits(expected));
    }
  }
}

// Each head has what it has where all heads have its mask.
TEST_P(AttentionBlockMask, OfHeadsDontMix) {
  for (const Dims& dims : usual_dims(row())) {
    const AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, {-1, 0});
    AttentionInputs inputs = random_inputs(spec, {{260, 700, 440}}, 20);
    for (const int heads : {kKvHeads, kHeads}) {
      const Listed own = some(50, 8);
      set_block_mask(inputs, shape_of(spec, heads), own);
      const AttentionResult result = attend(inputs);
      for (int list = 0; list < heads; ++list) {
        AttentionInputs shared = inputs;
        set_block_mask(shared, shape_of(spec, 1), [&](BlockMaskRow place, std::int64_t block) {
          place.head = list;
          return own(place, block);
        });
        const AttentionResult alone = attend(shared);
        for (std::int64_t row = 0; row < 260 * kHeads; ++row) {
          if (row % kHeads * heads / kHeads != list) continue;
          ASSERT_TRUE(same_row(inputs, result, alone, row)) << describe(inputs.spec) << ", row " << row;
        }
        count_check();
      }
    }
  }
}

// Lists go by position, so the queries of a chunk have those of the whole.
TEST_P(AttentionBlockMask, OfChunksAreThoseOfTheWhole) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), kHeads, kKvHeads, {-1, 0});
  for (const int heads : kListHeads) {
    const BlockMaskShape shape = shape_of(spec, heads);
    const Listed listed = some(50, 9);
    AttentionInputs whole = random_inputs(spec, {{444, 444, 0}}, 21);
    set_block_mask(whole, shape, listed);
    const AttentionResult expected = attend(whole);
    AttentionResult chunks;
    for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 1}, {1, 130}, {130, 257}, {257, 444}}) {
      AttentionInputs chunk;
      chunk.spec = spec;
      chunk.sequences = {{end - begin, end, begin}};
      const auto cut = [](const std::vector<std::byte>& all, std::int64_t from, std::int64_t to) {
        const auto row = static_cast<std::ptrdiff_t>(all.size() / 444);
        return std::vector<std::byte>(all.begin() + from * row, all.begin() + to * row);
      };
      chunk.q = cut(whole.q, begin, end);
      chunk.k = cut(whole.k, 0, end);
      chunk.v = cut(whole.v, 0, end);
      set_block_mask(chunk, shape, listed);
      const AttentionResult result = attend(chunk);
      chunks.out.insert(chunks.out.end(), result.out.begin(), result.out.end());
      chunks.lse.insert(chunks.lse.end(), result.lse.begin(), result.lse.end());
    }
    EXPECT_TRUE(chunks.same_bits(expected)) << describe(whole.spec);
  }
}

// A kernel says so where blocks are no multiples of its tiles, and refuses tasks whose masks are not its own.
TEST_P(AttentionBlockMask, ThatDontFitAreRefused) {
  AttentionSpec spec = make_spec(usual_dims(row()).front(), kHeads, kKvHeads, {-1, 0});
  const BlockMaskShape fitting = shape_of(spec, 1);
  spec.block_mask = fitting;
  EXPECT_TRUE(row().missing(spec).empty());
  spec.block_mask.key_block += 1;
  ASSERT_EQ(row().missing(spec).size(), 1U);
  EXPECT_NE(row().missing(spec)[0].find("block mask of"), std::string::npos) << row().missing(spec)[0];

  AttentionInputs inputs =
      random_inputs(make_spec(usual_dims(row()).front(), kHeads, kKvHeads, {-1, 0}), {{50, 90, 40}}, 22);
  set_block_mask(inputs, fitting, all_blocks());
  AttentionRunner listed(row(), inputs.spec);
  AttentionInputs none = inputs;
  none.block_mask = nullptr;
  EXPECT_THROW(listed.run(none), Error);
  AttentionInputs others = inputs;
  others.sequences[0].k_len = 80;
  set_block_mask(others, fitting, all_blocks());
  others.sequences[0].k_len = 90;
  EXPECT_THROW(listed.run(others), Error);
  EXPECT_TRUE(listed.run(inputs).same_bits(attend(inputs)));
}

RINGATTN_FOR_EVERY_KERNEL(AttentionBlockMask);

}  // namespace
}  // namespace ringattn::testing
