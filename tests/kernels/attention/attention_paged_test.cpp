// SPDX-License-Identifier: Apache-2.0
// Keys in the pages of a cache, by memcmp: a row's bits are those of the same keys in one dense array. Pages are
// shuffled, and all that no sequence owns is NaN.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "tests/kernels/common/kernel_row_test.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kPageSizes[] = {16, 32, 64, 128, 256};
constexpr Mask kMasks[] = {{-1, -1}, {-1, 0}, {100, 0}, {150, 33}};

class AttentionPaged : public KernelRowTest {
 protected:
  void expect_dense_bits(const AttentionInputs& inputs, const std::vector<Arrangement>& arrangements) {
    const AttentionResult dense = attend_with(row(), inputs);
    for (const Arrangement& arrangement : arrangements) {
      const PageLayout& pages = arrangement.pages;
      ASSERT_TRUE(attend_with(row(), inputs, arrangement).same_bits(dense))
          << describe(inputs.spec) << "; pages of " << pages.page_size << (pages.head_major ? ", head-major" : "")
          << ", shuffle " << pages.shuffle << ", shared " << pages.shared << ", gap " << pages.gap
          << ", tiles per task " << arrangement.tiles_per_task;
    }
  }
  // Every page size, in both orders of a page's axes.
  static std::vector<Arrangement> all_pages() {
    CaseChoice all(1);
    return some_pages(all);
  }
  static std::vector<Arrangement> some_pages(CaseChoice& cases) {
    std::vector<Arrangement> arrangements;
    for (const std::int64_t size : kPageSizes) {
      for (const bool head_major : {false, true}) {
        if (!cases.take()) continue;
        Arrangement& arrangement = arrangements.emplace_back();
        arrangement.pages = {size, head_major, static_cast<std::uint64_t>(size) + 7};
      }
    }
    return arrangements;
  }
};

// Sequences that end around pages and tiles of every size, and one of nothing. Where every query sees every key, CTAs
// may fetch the keys of a tile together.
TEST_P(AttentionPaged, EveryHeadDimAndPageSize) {
  CaseChoice cases = choose_cases(3);
  for (const Dims& dims : all_dims(row())) {
    expect_dense_bits(
        random_inputs(make_spec(dims, 4, 2, {-1, 0}),
                      {{15, 15, 0}, {40, 300, 260}, {1, 1, 0}, {20, 129, 109}, {3, 0, 0}, {30, 448, 418}}, 61),
        some_pages(cases));
    expect_dense_bits(
        random_inputs(make_spec(dims, 8, 1, {-1, -1}), {{70, 1000, 0}, {40, 129, 0}, {90, 15, 0}, {64, 640, 0}}, 60),
        some_pages(cases));
  }
}

TEST_P(AttentionPaged, EveryLengthAroundPagesAndTiles) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 2, 1, {-1, -1});
  for (const std::int64_t keys :
       {1, 15, 16, 17, 31, 33, 63, 64, 65, 79, 80, 81, 111, 112, 113, 127, 128, 129, 255, 257}) {
    expect_dense_bits(random_inputs(spec, {{5, keys, 0}, {2, keys + 1, 3}}, static_cast<std::uint64_t>(keys)),
                      all_pages());
  }
}

TEST_P(AttentionPaged, EveryMaskWithRaggedBatches) {
  for (const Mask& mask : kMasks) {
    AttentionSpec spec = make_spec(usual_dims(row()).front(), 6, 2, mask);
    spec.softcap = 25.0F;
    spec.sinks = true;
    const AttentionInputs inputs =
        random_inputs(spec, {{300, 700, 400}, {0, 60, 0}, {130, 257, -9}, {1, 1, 0}, {20, 0, 0}}, 62);
    std::vector<Arrangement> arrangements = all_pages();
    for (Arrangement& arrangement : arrangements) {
      arrangement.run_rows = 50;
      arrangement.strided = true;
    }
    expect_dense_bits(inputs, arrangements);
  }
}

// Pages apart from each other: by a token's row, by a whole page, as where K and V share a pool, or by a number of
// elements that neither rows nor heads are evenly spaced over the pool, or rows not aligned for vector loads.
TEST_P(AttentionPaged, PagesApartFromEachOther) {
  for (const Dims& dims : varied_dims(row())) {
    const AttentionInputs inputs = random_inputs(make_spec(dims, 4, 2, {-1, 0}), {{200, 430, 230}, {60, 60, 0}}, 63);
    const std::int64_t token = std::int64_t{2} * dims.head_dim;
    std::vector<Arrangement> arrangements;
    for (const std::int64_t size : kPageSizes) {
      for (const std::int64_t gap : {token, size * token, std::int64_t{8}, std::int64_t{2}}) {
        for (const bool head_major : {false, true}) {
          arrangements.emplace_back().pages = {size, head_major, 9, 0, gap};
        }
      }
    }
    expect_dense_bits(inputs, arrangements);
  }
}

TEST_P(AttentionPaged, SharedPrefixPages) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 4, 1, {-1, 0});
  AttentionInputs inputs = random_inputs(spec, {{10, 600, 590}, {200, 520, 320}, {64, 900, 836}}, 64);
  constexpr std::int64_t kShared = 512;
  const auto share = [&](std::vector<std::byte>& rows, int dim) {
    const auto row = static_cast<std::size_t>(spec.kv_heads * dim) * size_of(spec.dtype);
    for (std::size_t s = 1; s < inputs.sequences.size(); ++s) {
      std::copy_n(rows.begin(), kShared * row,
                  rows.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(inputs.k_begin(s)) * row));
    }
  };
  share(inputs.k, spec.head_dim);
  share(inputs.v, spec.head_dim_v);
  std::vector<Arrangement> arrangements = all_pages();
  for (Arrangement& arrangement : arrangements) arrangement.pages.shared = kShared;
  expect_dense_bits(inputs, arrangements);
}

// Tasks that go on from a state, and threads.
TEST_P(AttentionPaged, SplitIntoTasks) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 4, 2, {-1, 0});
  const AttentionInputs inputs = random_inputs(spec, {{300, 700, 400}, {130, 257, 127}, {1, 1, 0}}, 65);
  for (const std::int64_t tiles : {1, 2, 5}) {
    std::vector<Arrangement> arrangements = all_pages();
    for (Arrangement& arrangement : arrangements) {
      arrangement.tiles_per_task = tiles;
      arrangement.threads = 3;
      arrangement.separate_finish = tiles == 2;
    }
    expect_dense_bits(inputs, arrangements);
  }
}

// Groups of key tiles end at 64 of them.
TEST_P(AttentionPaged, AroundTheEndOfAKvSplit) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 1, 1, {-1, 0});
  const int key_tile = AttentionRunner(row(), spec).kernel().key_tile();
  for (const std::int64_t keys :
       {std::int64_t{8191}, std::int64_t{8192}, std::int64_t{8193}, std::int64_t{64} * key_tile + 1}) {
    const AttentionInputs inputs = random_inputs(spec, {{3, keys, keys - 3}}, static_cast<std::uint64_t>(keys));
    std::vector<Arrangement> arrangements;
    for (const std::int64_t size : kPageSizes) {
      arrangements.emplace_back().pages = {size, size % 3 == 1, 5};
    }
    expect_dense_bits(inputs, arrangements);
  }
}

TEST_P(AttentionPaged, WithNonFiniteValues) {
  AttentionInputs inputs = random_inputs(make_spec(usual_dims(row()).front(), 4, 2, {-1, 0}), {{300, 700, 400}}, 66);
  inputs.set_v(600, 0, 3, std::numeric_limits<float>::quiet_NaN());
  inputs.set_k(450, 1, 4, -std::numeric_limits<float>::infinity());
  inputs.set_q(299, 1, 4, std::numeric_limits<float>::quiet_NaN());
  expect_dense_bits(inputs, all_pages());
}

RINGATTN_FOR_EVERY_KERNEL(AttentionPaged);

}  // namespace
}  // namespace ringattn::testing
