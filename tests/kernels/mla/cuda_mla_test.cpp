// SPDX-License-Identifier: Apache-2.0
// sm90_mla and sm90_mla_split1k decode over latents. No attention kernel computes like them, so their rows are held
// against fp64, and against themselves by memcmp: in any batch, layout, number of rows, CTA counts and KV partitions.
// Lengths are given in KV splits of the kernel.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/cuda.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/decode_runner.hpp"

namespace ringattn::testing {
namespace {

// A row of the table, and how many keys its KV splits have.
struct MlaKernel {
  const char* name;
  std::int64_t group;
};
void PrintTo(const MlaKernel& kernel, std::ostream* stream) { *stream << kernel.name; }
constexpr MlaKernel kKernels[] = {{"sm90_mla", 4096}, {"sm90_mla_split1k", 1024}};
// CacheLayout::slices of every form: a CTA, a pair, three or four CTAs per work tile, and six or eight for two blocks
// of rows.
constexpr int kForms[] = {1, 2, 3, 4, 6, 8};

class CudaMla : public ::testing::TestWithParam<std::tuple<MlaKernel, Dtype>> {
 protected:
  void SetUp() override {
    row_ = row_of(kernel().name);
    if (row_ == nullptr) GTEST_SKIP() << "needs: a build for Hopper";
    const std::string reason = row_->unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
  }

  static const MlaKernel& kernel() { return std::get<0>(GetParam()); }
  static Dtype dtype() { return std::get<1>(GetParam()); }
  // Null: this build has none.
  static const DecodeRow* row_of(std::string_view name) {
    for (const DecodeRow& row : kernel_table<DecodeSpec>()) {
      if (row.name == name) return &row;
    }
    return nullptr;
  }

  AttentionSpec spec(int heads, const Mask& mask = {-1, 0}) const {
    AttentionSpec of = make_spec(dtype(), heads, 1, 576, mask);
    of.head_dim_v = 512;
    of.softmax_scale = 0.0722F;  // of 192 dims, as in a model
    return of;
  }
  static AttentionInputs inputs(const AttentionSpec& spec, int rows, const std::vector<std::int64_t>& lengths,
                                std::uint64_t seed) {
    return with_values_in_keys(decode_inputs(spec, rows, lengths, seed));
  }
  AttentionResult run(const AttentionInputs& of, CacheLayout layout = {}) const {
    layout.values_in_keys = true;
    return DecodeRunner(*row_, of, layout).run();
  }
  void expect_right(const AttentionInputs& of, const CacheLayout& layout = {}) const {
    const AttentionResult result = run(of, layout);
    EXPECT_EQ(check_accuracy(of, result.out, result.lse), "") << describe(of.spec) << ", " << of.sequences[0].q_len;
  }

  // By partitions over that many caches, in pages and not, that are merged.
  AttentionResult merged(const AttentionInputs& of, int count) const {
    std::int64_t longest = 0;
    for (const auto& sequence : of.sequences) longest = std::max(longest, sequence.k_len);
    std::vector<std::unique_ptr<DecodeRunner>> runners;
    std::vector<const float*> records;
    for (int i = 0; i < count; ++i) {
      runners.push_back(std::make_unique<DecodeRunner>(
          *row_, of, CacheLayout{.page_size = i % 2 == 0 ? 64 : 0, .partition = {i, count}, .values_in_keys = true}));
      runners.back()->make_partials(splits_per_partition(longest, count, group_));
      runners.back()->enqueue_leave(runners.back()->backend().stream());
      runners.back()->wait();
      records.push_back(runners.back()->partials());
    }
    runners[0]->enqueue_merge(records, runners[0]->backend().stream());
    return runners[0]->read();
  }

  // All forms, in pages and not.
  void expect_same_in_every_form(const AttentionInputs& of) const {
    const AttentionResult expected = run(of, {.slices = 1});
    for (const int slices : kForms) {
      for (const std::int64_t page : {0, 16, 64}) {
        EXPECT_TRUE(run(of, {.page_size = page, .slices = slices}).same_bits(expected))
            << describe(of.spec) << ", slices " << slices << ", page " << page;
      }
    }
  }

  const DecodeRow* row_ = nullptr;
  const std::int64_t group_ = kernel().group;
};

// One row of one sequence of `result`, as bytes of O and LSE.
std::vector<std::byte> row_bytes(const AttentionInputs& of, const AttentionResult& result, std::int64_t row) {
  const std::size_t out = static_cast<std::size_t>(of.spec.heads * of.spec.head_dim_v) * size_of(of.spec.dtype);
  const std::size_t lse = static_cast<std::size_t>(of.spec.heads) * sizeof(float);
  const auto at = static_cast<std::size_t>(row);
  std::vector<std::byte> bytes(out + lse);
  std::memcpy(bytes.data(), result.out.data() + at * out, out);
  std::memcpy(bytes.data() + out, result.lse.data() + at * static_cast<std::size_t>(of.spec.heads), lse);
  return bytes;
}

TEST_P(CudaMla, OneTile) { expect_right(inputs(spec(64), 1, {64}, 1)); }
TEST_P(CudaMla, TwoTiles) { expect_right(inputs(spec(64), 1, {128}, 2)); }
TEST_P(CudaMla, OneKey) { expect_right(inputs(spec(16), 1, {1}, 3)); }
TEST_P(CudaMla, ManyTiles) { expect_right(inputs(spec(128), 1, {group_}, 4)); }

// CTA pairs, and groups of three and four CTAs, over a few tiles.
TEST_P(CudaMla, CtaGroupsOfAFewTiles) {
  const AttentionInputs of = inputs(spec(16), 1, {300, 65}, 21);
  const AttentionResult expected = run(of, {.slices = 1});
  for (const int slices : {2, 3, 4}) EXPECT_TRUE(run(of, {.slices = slices}).same_bits(expected)) << slices;
}

TEST_P(CudaMla, LengthsAroundEdges) {
  const AttentionSpec of = spec(16);
  for (const int slices : {0, 1, 2}) {
    const CacheLayout layout{.slices = slices};
    expect_right(inputs(of, 1, {1, 63, 64, 65, 127, 128, 129, 191, 0, group_ - 1}, 5), layout);
    expect_right(inputs(of, 2, {1023, 1024, 1025, 4095, 4096, 4097}, 22), layout);  // edges of both kernels' KV splits
    expect_right(inputs(of, 1, {group_, group_ + 1, 2 * group_, 2 * group_ + 1, 3 * group_ - 63, 7, 0}, 6), layout);
  }
}

TEST_P(CudaMla, HeadsAndRows) {
  for (const int heads : {1, 5, 16, 64, 128}) {
    for (const int rows : {1, 2, 3, 16}) expect_right(inputs(spec(heads), rows, {300, 1, 97}, 7));
  }
}

TEST_P(CudaMla, MasksCapAndSinks) {
  for (const Mask& mask : {Mask{-1, -1}, Mask{100, 0}, Mask{0, 0}, Mask{group_ + 4, 0}}) {
    AttentionSpec of = spec(16, mask);
    expect_right(inputs(of, 3, {group_ + 904, 130, 2, 66}, 8));
    of.sinks = true;
    of.softcap = 20.0F;
    expect_right(inputs(of, 2, {group_ + 404, 64, 65}, 9));
  }
  AttentionSpec negative = spec(16);
  negative.softmax_scale = -0.05F;
  expect_right(inputs(negative, 2, {500, 64}, 10));
}

TEST_P(CudaMla, LayoutsHaveTheSameBits) {
  for (const int heads : {16, 64}) {  // a part of a block of rows, and two blocks
    const AttentionInputs of = inputs(spec(heads), 2, {group_ + 77, 130, 1, 64, 2 * group_}, 11);
    const AttentionResult dense = run(of);
    EXPECT_EQ(check_accuracy(of, dense.out, dense.lse), "");
    for (const std::int64_t page : {16, 32, 64, 128, 256}) {
      EXPECT_TRUE(run(of, {.page_size = page}).same_bits(dense)) << page;
      EXPECT_TRUE(run(of, {.page_size = page, .shuffle = 5, .strided = true}).same_bits(dense)) << page;
    }
    EXPECT_TRUE(run(of, {.strided = true}).same_bits(dense));
    for (const int slices : kForms) {
      EXPECT_TRUE(run(of, {.slices = slices}).same_bits(dense)) << slices;
      EXPECT_TRUE(run(of, {.page_size = 64, .slices = slices}).same_bits(dense)) << slices;
      EXPECT_TRUE(run(of, {.page_size = 32, .shuffle = 5, .strided = true, .slices = slices}).same_bits(dense))
          << slices;
    }
  }
}

// Units of none to ten tiles, which begin and end anywhere in a tile and in a turn of the CTAs that score; one block of
// rows, two and three.
TEST_P(CudaMla, FormsHaveTheSameBits) {
  std::vector<std::int64_t> lengths = {0, 1, 33, 64, 65, 2 * group_ + 130};
  for (std::int64_t tiles = 2; tiles <= 10; ++tiles) lengths.push_back(tiles * 64 - tiles * 5 % 64);
  for (const int heads : {16, 128, 130}) expect_same_in_every_form(inputs(spec(heads), 1, lengths, 18));
  for (const Mask& mask : {Mask{100, 0}, Mask{-1, -1}, Mask{group_ + 4, 0}}) {
    AttentionSpec of = spec(43, mask);
    of.sinks = true;
    of.softcap = 20.0F;
    expect_same_in_every_form(inputs(of, 3, {group_ + 1000, 130, 3, 450}, 19));
  }
}

// From few work tiles to many, each form is the one that is chosen for some of these steps.
TEST_P(CudaMla, EveryNumberOfWorkTiles) {
  for (const std::int64_t sequences : {3, 7, 15, 20, 32, 70}) {
    std::vector<std::int64_t> lengths;
    for (std::int64_t i = 0; i < sequences; ++i) lengths.push_back(i * 67 % 400);
    const AttentionInputs of = inputs(spec(128), 1, lengths, 20);
    EXPECT_TRUE(run(of).same_bits(run(of, {.slices = 1}))) << sequences;
  }
}

// Work tiles of whole KV splits, from few to many: CTA groups, pairs and single CTAs, and the merge of up to 34 splits.
TEST_P(CudaMla, EveryNumberOfKvSplits) {
  for (const std::int64_t groups : {3, 5, 12, 18, 34}) {
    const AttentionInputs of = inputs(spec(128), 1, {groups * group_ - 7}, 23);
    EXPECT_TRUE(run(of).same_bits(run(of, {.slices = 1}))) << groups;
  }
  expect_right(inputs(spec(16), 1, {9 * group_ - 7, 5 * group_ + 1}, 24));
}

// With as many rows as CTAs, each CTA computes all KV splits of its row. Where splits are too few for that, or
// sequences differ too much, no CTA does. Rows of a sequence have different first or last KV splits; some see no key.
TEST_P(CudaMla, ManyRowsOfSeveralKvSplits) {
  const std::vector<std::int64_t> lengths = {
      2 * group_ + 4, 3 * group_, 2 * group_ + 1, 2 * group_ + 130, 0, 3 * group_ - 63, 2 * group_ + 700, 9};
  for (const Mask& mask : {Mask{-1, 0}, Mask{group_ + 70, 0}, Mask{3, 0}}) {
    const AttentionInputs of = inputs(spec(128, mask), 8, lengths, 28);
    const AttentionResult expected = run(of, {.slices = 2});
    EXPECT_TRUE(run(of).same_bits(expected)) << mask.left;
    EXPECT_TRUE(run(of, {.page_size = 16}).same_bits(expected)) << mask.left;
    EXPECT_TRUE(run(of, {.page_size = 64, .strided = true}).same_bits(expected)) << mask.left;
  }
  const AttentionInputs longest = inputs(spec(128), 8, lengths, 29);
  DecodeRunner runner(*row_, longest, {.page_size = 64, .values_in_keys = true});
  const Stream stream = runner.backend().stream();
  const Graph graph(stream, [&] { runner.enqueue(stream); });
  std::vector<std::int64_t> shorter = lengths;
  for (const std::int64_t most : {3 * group_, 2 * group_ + 4, 2 * group_, group_ + 1, group_, std::int64_t{5}}) {
    for (std::int64_t& length : shorter) length = std::min(length, most);
    runner.set_lengths(shorter);
    graph.launch();
    EXPECT_TRUE(runner.read().same_bits(run(shortened(longest, shorter), {.slices = 2}))) << most;
  }
  const std::vector<std::int64_t> different = {5, 0, 5, 5, 0, 3 * group_ - 63, 5, 5};
  runner.set_lengths(different);
  graph.launch();
  EXPECT_TRUE(runner.read().same_bits(run(shortened(longest, different), {.slices = 2})));
}

// With a window rows of a sequence have other first KV splits, and without one other last ones.
TEST_P(CudaMla, KvSplitsOfSomeRows) {
  const std::vector<std::int64_t> lengths = {2 * group_ + 2, 0, 2 * group_, 9, 3 * group_ + 72};
  for (const Mask& mask : {Mask{-1, 0}, Mask{group_ + 70, 0}, Mask{3, 0}, Mask{2 * group_, group_}}) {
    const AttentionInputs of = inputs(spec(16, mask), 3, lengths, 25);
    expect_right(of);
    expect_same_in_every_form(of);
    const AttentionResult expected = run(of);
    for (const int count : {2, 3}) EXPECT_TRUE(merged(of, count).same_bits(expected)) << count << ", " << mask.left;
  }
}

// Up to the end of the shorter KV split nothing tells the kernels apart.
TEST_P(CudaMla, OneKvSplitHasTheSameBitsWithEitherKernel) {
  std::int64_t shorter = group_;
  for (const MlaKernel& other : kKernels) shorter = std::min(shorter, other.group);
  const AttentionInputs of = inputs(spec(70), 2, {2, 63, 64, 65, 700, shorter - 1, shorter}, 27);
  const AttentionResult expected = run(of);
  for (const MlaKernel& other : kKernels) {
    DecodeRunner runner(*row_of(other.name), of, {.page_size = 64, .values_in_keys = true});
    EXPECT_EQ(runner.kernel().kv_split_keys(), other.group);
    EXPECT_TRUE(runner.run().same_bits(expected)) << other.name;
  }
}

// The same row in a step of several rows, of one row, and in another batch.
TEST_P(CudaMla, ARowHasItsBitsInAnyStep) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{200, 0}}) {
    const std::vector<std::int64_t> lengths = {group_ + 66, 65, 130};
    constexpr int kRows = 5;
    const AttentionInputs together = inputs(spec(16, mask), kRows, lengths, 12);
    const AttentionResult expected = run(together);
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      for (int i = 0; i < kRows; ++i) {
        AttentionInputs alone = together;
        const std::int64_t keys = lengths[s] - kRows + 1 + i;
        alone.sequences = {{1, keys, keys - 1}};
        const std::size_t q = static_cast<std::size_t>(16 * 576) * 2;
        const auto row = static_cast<std::int64_t>(s) * kRows + i;
        alone.q.assign(together.q.begin() + row * static_cast<std::int64_t>(q),
                       together.q.begin() + (row + 1) * static_cast<std::int64_t>(q));
        const auto cut = [&](std::vector<std::byte>& to, const std::vector<std::byte>& from, std::size_t bytes) {
          const std::size_t begin = static_cast<std::size_t>(together.k_begin(s)) * bytes;
          to.assign(from.begin() + static_cast<std::ptrdiff_t>(begin),
                    from.begin() + static_cast<std::ptrdiff_t>(begin + static_cast<std::size_t>(keys) * bytes));
        };
        cut(alone.k, together.k, 576 * 2);
        cut(alone.v, together.v, 512 * 2);
        const AttentionResult single = run(alone, {.page_size = 32});
        ASSERT_EQ(row_bytes(alone, single, 0), row_bytes(together, expected, row))
            << "sequence " << s << ", row " << i << ", window " << mask.left;
      }
    }
  }
}

// More work tiles than SMs, of none to five key tiles, for two row blocks: pipeline stages pass from work tile to
// work tile.
TEST_P(CudaMla, ManyShortWorkTiles) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < 256; ++i) lengths.push_back(i * 37 % 331);
  const AttentionInputs of = inputs(spec(70), 1, lengths, 17);
  const AttentionResult result = run(of);
  // The first ones by themselves are held against fp64: all of them take it too long.
  constexpr std::size_t kSome = 12;
  AttentionInputs some = of;
  some.sequences.resize(kSome);
  some.q.resize(kSome * 70 * 576 * 2);
  some.k.resize(static_cast<std::size_t>(of.k_begin(kSome)) * 576 * 2);
  some.v.resize(static_cast<std::size_t>(of.k_begin(kSome)) * 512 * 2);
  const AttentionResult first = run(some);
  EXPECT_EQ(check_accuracy(some, first.out, first.lse), "");
  for (std::size_t row = 0; row < kSome; ++row) {
    const auto at = static_cast<std::int64_t>(row);
    EXPECT_EQ(row_bytes(of, result, at), row_bytes(some, first, at)) << row;
  }
  for (const int slices : kForms) {
    EXPECT_TRUE(run(of, {.page_size = 16, .slices = slices}).same_bits(result)) << slices;
  }
}

// More sequences than a launch takes, of which some have several KV splits: wherever a launch ends, each sequence has
// the bits that it has in a smaller batch. A captured step follows lengths that grow.
TEST_P(CudaMla, MoreSequencesThanALaunch) {
  for (const std::int64_t count : {257, 1025, 3000}) {
    std::vector<std::int64_t> lengths;
    for (std::int64_t s = 0; s < count; ++s) lengths.push_back(s * 37 % 61 + 1);
    for (const std::int64_t s : {std::int64_t{3}, count / 2, count - 1}) {
      lengths[static_cast<std::size_t>(s)] = group_ + 1 + s % 64;
    }
    const AttentionInputs of = inputs(spec(16), 1, lengths, 27);
    DecodeRunner runner(*row_, of, {.page_size = 16, .values_in_keys = true});
    const Stream stream = runner.backend().stream();
    const Graph graph(stream, [&] { runner.enqueue(stream); });
    for (const std::int64_t less : {1, 0}) {
      std::vector<std::int64_t> now = lengths;
      for (std::int64_t& length : now) length -= less;
      runner.set_lengths(now);
      graph.launch();
      graph.launch();
      const AttentionResult together = runner.read();
      const AttentionInputs shorter = shortened(of, now);
      constexpr std::size_t kFew = 90;
      for (const std::size_t first : {std::size_t{0}, lengths.size() / 2 - 45, lengths.size() - kFew}) {
        const AttentionInputs few = sequences_of(shorter, first, kFew);
        EXPECT_TRUE(run(few, {.page_size = 64}).same_bits(rows_of(together, few, first)))
            << count << ", " << first << ", " << less;
      }
    }
  }
  std::vector<std::int64_t> lengths(300, 70);
  lengths[7] = lengths[280] = group_ + 3;
  const AttentionInputs of = inputs(spec(16), 2, lengths, 28);
  EXPECT_TRUE(merged(of, 2).same_bits(run(of, {.page_size = 32})));
}

TEST_P(CudaMla, PartitionsMergeToTheWhole) {
  const AttentionInputs of = inputs(spec(16), 2, {3 * group_ + 9, 40, group_, 0, 2 * group_ + 1}, 13);
  const AttentionResult expected = run(of);
  for (const int count : {1, 2, 3, 5}) EXPECT_TRUE(merged(of, count).same_bits(expected)) << count;
}

// References move in later tiles, of any CTA or warpgroup, by little and by much, and in tiles that follow each other.
TEST_P(CudaMla, RowsThatExceedTheRescaleThreshold) {
  for (const int heads : {16, 64}) {
    const AttentionSpec of = spec(heads);
    AttentionInputs new_lengths = inputs(of, 2, {group_ + 900, 700}, 14);
    for (int head = 0; head < of.heads; head += 3) new_lengths.set_q(1, head, 0, 1.0F / of.softmax_scale);
    for (const auto& [key, level] : {std::pair<std::int64_t, float>{70, 30.0F},
                                     {140, 60.0F},
                                     {700, 59.0F},
                                     {std::max<std::int64_t>(group_ / 2 - 48, 812), 90.0F},
                                     {group_ + 4, 80.0F}}) {
      new_lengths.set_k(key, 0, 0, level);
      new_lengths.set_v(key, 0, 0, level);
    }
    for (const int slices : {0, 1, 2}) expect_right(new_lengths, {.slices = slices});
    EXPECT_TRUE(run(new_lengths, {.page_size = 16, .slices = 2}).same_bits(run(new_lengths, {.slices = 1})));
    expect_same_in_every_form(new_lengths);
    for (int tile = 5; tile < 11; ++tile) {
      new_lengths.set_k(tile * 64 + 9 * tile % 64, 0, 0, 15.0F * static_cast<float>(tile));
    }
    expect_same_in_every_form(with_values_in_keys(new_lengths));
  }
}

// The greatest scores lie in KV splits that are neither a row's first nor its last: little above the others', so that
// all splits count, then so far that the merge moves its softmax_offset there, and then a little below that.
TEST_P(CudaMla, RowsThatExceedTheRescaleThresholdInAMiddleKvSplit) {
  const AttentionSpec of = spec(16);
  for (const float level : {6.0F, 40.0F}) {
    AttentionInputs new_lengths = inputs(of, 2, {4 * group_ + 9, 3 * group_}, 26);
    for (int head = 0; head < of.heads; head += 3) {
      for (const std::int64_t row : {1, 3}) new_lengths.set_q(row, head, 0, 1.0F / of.softmax_scale);
    }
    for (const std::int64_t first : {std::int64_t{0}, 4 * group_ + 9}) {
      for (const auto& [key, score] : {std::pair{group_ + group_ / 2 + 5, level}, {2 * group_ + 70, level - 2.0F}}) {
        new_lengths.set_k(first + key, 0, 0, score);
        new_lengths.set_v(first + key, 0, 0, score);
      }
    }
    expect_right(new_lengths);
    expect_same_in_every_form(new_lengths);
    const AttentionResult expected = run(new_lengths);
    for (const int count : {2, 3, 4, 7}) {
      EXPECT_TRUE(merged(new_lengths, count).same_bits(expected)) << level << ", " << count;
    }
  }
}

// A key that isn't finite taints the rows that see it, and no others.
TEST_P(CudaMla, NonFiniteKeys) {
  const AttentionSpec of = spec(16);
  const AttentionInputs clean = inputs(of, 1, {500, 300}, 15);
  AttentionInputs planted = clean;
  planted.set_k(130, 0, 3, std::numeric_limits<float>::quiet_NaN());
  planted.set_v(130, 0, 3, std::numeric_limits<float>::quiet_NaN());
  const AttentionResult result = run(planted);
  EXPECT_EQ(row_bytes(planted, result, 1), row_bytes(clean, run(clean), 1));
  EXPECT_TRUE(std::all_of(result.lse.begin(), result.lse.begin() + 16, [](float x) { return std::isnan(x); }));
}

TEST_P(CudaMla, AGraphFollowsGrowingSequences) {
  const AttentionSpec of = spec(16);
  const AttentionInputs longest = inputs(of, 2, {group_ + 40, 100}, 16);
  DecodeRunner runner(*row_, longest, {.page_size = 64, .values_in_keys = true});
  const Stream stream = runner.backend().stream();
  const Graph graph(stream, [&] { runner.enqueue(stream); });
  for (const std::int64_t less : {98, 70, 41, 40, 39, 36, 3, 0}) {
    const std::vector<std::int64_t> lengths = {group_ + 40 - less, 100 - less};
    runner.set_lengths(lengths);
    graph.launch();
    graph.launch();
    EXPECT_TRUE(runner.read().same_bits(run(shortened(longest, lengths)))) << less;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, CudaMla, ::testing::Combine(::testing::ValuesIn(kKernels), ::testing::Values(Dtype::kBf16, Dtype::kF16)),
    [](const auto& test) {
      return fmt::format("{}_{}", std::get<0>(test.param).name, dtype_name(std::get<1>(test.param)));
    });

}  // namespace
}  // namespace ringattn::testing
