// SPDX-License-Identifier: Apache-2.0
// Sequences that share prefixes: a step that is told of them has the bits of one that isn't, and of attention, by
// memcmp of O and LSE, for every kernel that decodes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "tests/kernels/decode/decode_row_test.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

// Which sequence has which prefix, and how long all are.
struct Shared {
  std::vector<std::int64_t> lengths;
  std::vector<std::int32_t> prefix_of;
  std::vector<std::int32_t> prefix_keys;
};

class DecodePrefixes : public DecodeRowTest {
 protected:
  std::int64_t group_of(const AttentionSpec& spec) const {
    return std::int64_t{kTilesPerKvSplit} * AttentionRunner(attention_row(), spec).kernel().key_tile();
  }

  static AttentionInputs inputs_of(const AttentionSpec& spec, int rows, const Shared& shared, std::uint64_t seed) {
    return with_prefixes(decode_inputs(spec, rows, shared.lengths, seed), shared.prefix_of, shared.prefix_keys);
  }
  static CacheLayout layout_of(const Shared& shared, std::int64_t page) {
    return {.page_size = page, .prefix_of = shared.prefix_of, .prefix_keys = shared.prefix_keys};
  }
  // By every form that the kernel can be made to take.
  void expect_same_shared(const AttentionInputs& inputs, const Shared& shared, std::int64_t page) const {
    const AttentionResult expected = folded(inputs);
    for (const int slices : forms()) {
      SCOPED_TRACE(fmt::format("{}, page {}, slices {}", describe(inputs.spec), page, slices));
      CacheLayout layout = layout_of(shared, page);
      layout.slices = slices;
      const AttentionResult got = DecodeRunner(row(), inputs, layout, 2).run();
      EXPECT_TRUE(got.same_bits(expected)) << first_difference(got, expected, inputs.spec);
    }
  }
  void expect_same_shared(const AttentionSpec& spec, int rows, const Shared& shared, std::uint64_t seed,
                          std::int64_t page = 64) const {
    expect_same_shared(inputs_of(spec, rows, shared, seed), shared, page);
  }

  bool on_device() const { return row().backend == "cuda"; }
  // CTAs per work tile (DecodeLimits::slices): as many as the kernel chooses, one, two, or four; of a prefix two at
  // most.
  std::vector<int> forms() const { return on_device() ? std::vector<int>{0, 1, 2, 4} : std::vector<int>{0}; }
  // Head dims of all forms: on GPUs two CTAs share a work tile of 128.
  std::vector<Dims> dims_of_forms() const {
    std::vector<Dims> dims = usual_dims(attention_row());
    for (const Dims& more : all_dims(attention_row())) {
      if (on_device() && more.head_dim == 128 && more.head_dim_v == 128) dims.push_back(more);
    }
    return dims;
  }

  // Two prefixes, of which one ends inside of a KV split, shared by sequences of any length, in any order. One sequence
  // has none, one names a prefix that is not there, and two end before their prefix does, or with it.
  static Shared ragged(std::int64_t group) {
    return {
        {2 * group + 301, group + 1, 2 * group + 900, 500, 3 * group + 7, group + 640, 2 * group - 5, 2 * group, 90},
        {0, 1, 0, -1, 0, 1, 0, 0, 2},
        {static_cast<std::int32_t>(2 * group + 300), static_cast<std::int32_t>(group)}};
  }
};

TEST_P(DecodePrefixes, RaggedSequences) {
  CaseChoice cases = choose_cases(2);
  for (const Dims& dims : dims_of_forms()) {
    std::uint64_t seed = 1;
    for (const int rows : {1, 3, 16}) {
      if (!cases.take()) continue;
      const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
      expect_same_shared(spec, rows, ragged(group_of(spec)), seed, rows == 3 ? 16 : 128);
      ++seed;
    }
  }
}

// Prefixes of any length: shorter than a tile, tiles and a rest, whole KV splits and tiles of the next one. Sequences
// end after them, with the first key after them, with their last key, or inside; one has no key; and two share another.
TEST_P(DecodePrefixes, AnyLength) {
  CaseChoice cases = choose_cases(2);
  for (const Dims& dims : dims_of_forms()) {
    std::uint64_t seed = 81;
    for (const std::int64_t keys : {1, 127, 128, 129, 3000, 8191, 8192, 8193, 12345}) {
      if (!cases.take()) continue;
      const AttentionSpec spec = seed % 2 == 0 ? make_spec(dims, 8, 1, {-1, 0}) : make_spec(dims, 4, 4, {-1, 0});
      const int rows = 1 + 2 * static_cast<int>(seed % 3);
      const Shared shared{{keys + 700, 400, keys + rows, keys, 0, keys / 2 + 1, 260, keys + 130},
                          {0, 1, 0, 0, 0, 0, 1, 0},
                          {static_cast<std::int32_t>(keys), 200}};
      expect_same_shared(spec, rows, shared, seed, std::int64_t{16} << seed % 5);
      ++seed;
    }
  }
}

// Every set of head dims.
TEST_P(DecodePrefixes, EveryConfiguration) {
  CaseChoice cases = choose_cases(2);
  std::uint64_t seed = 1;
  for (const Dims& dims : all_dims(attention_row())) {
    if (dims.head_dim > 256) continue;  // their inputs take long to make
    AttentionSpec spec = make_spec(dims, 2, 1, {-1, 0});
    spec.sinks = seed % 2 == 0;
    spec.softcap = seed % 3 == 0 ? 15.0F : 0.0F;
    const std::int64_t group = group_of(spec);
    for (const std::int64_t keys : {group + 5, group + 600, std::int64_t{300}}) {
      if (!cases.take()) continue;
      expect_same_shared(spec, 2, {{keys + 60, keys + 9}, {0, 0}, {static_cast<std::int32_t>(keys)}}, seed, 256);
    }
    ++seed;
  }
}

// Masks that hide a part of a prefix from some rows, or all of it, or nothing.
TEST_P(DecodePrefixes, EveryMask) {
  CaseChoice cases = choose_cases(3);
  for (const Dims& dims : dims_of_forms()) {
    const std::int64_t group = group_of(make_spec(dims, 4, 2, {-1, 0}));
    for (const std::int64_t keys : {group, group + 600}) {
      for (const Mask& mask : {Mask{-1, -1}, Mask{150, 0}, Mask{keys, 0}, Mask{keys + 309, 0}, Mask{4 * group, 30}}) {
        if (!cases.take()) continue;
        expect_same_shared(make_spec(dims, 4, 2, mask), 4,
                           {{keys + 312, keys + 310, keys + 3, keys + 2, keys + 1},
                            {0, 0, 0, 0, 0},
                            {static_cast<std::int32_t>(keys)}},
                           static_cast<std::uint64_t>(mask.left + 9));
      }
    }
  }
}

// Enough rows to fill several row blocks of the GEMM, the last of them partly.
TEST_P(DecodePrefixes, ManyRows) {
  const AttentionSpec spec = make_spec(dims_of_forms().back(), 8, 1, {-1, 0});
  const std::int64_t group = group_of(spec);
  Shared shared{{}, {}, {static_cast<std::int32_t>(group), static_cast<std::int32_t>(group + 160), 5}};
  for (std::int32_t s = 0; s < 11; ++s) {
    shared.lengths.push_back(group + 200 + s);
    shared.prefix_of.push_back(s % 3);
  }
  expect_same_shared(spec, 5, shared, 31, 32);
}

// Enough head work tiles that each CTA, or CTA pair, computes several consecutively. Plain, and with rows that exceed
// the rescale threshold of their softmax_offset in the first work tile of one of them, or in later ones.
TEST_P(DecodePrefixes, WorkTilesInARow) {
  for (const Dims& dims : dims_of_forms()) {
    const AttentionSpec spec = make_spec(dims, 64, 1, {-1, 0});
    const std::int64_t group = group_of(spec);
    const std::int64_t tile = group / kTilesPerKvSplit;
    const int rows = on_device() ? kMaxDecodeRows : 2;  // each, with its 64 heads, is a work tile
    // A whole KV split, and with it tiles of an incomplete one; or only an incomplete one, with a number of tiles that
    // doesn't divide evenly.
    for (const std::int64_t keys : {group, group + 3 * tile + 50, 7 * tile + 50}) {
      Shared shared{{}, {}, {static_cast<std::int32_t>(keys)}};
      for (int s = 9; s > (on_device() ? 0 : 7); --s) {
        shared.lengths.push_back(keys + 20 + s);
        shared.prefix_of.push_back(0);
      }
      const std::vector<int> none, first{1}, later{69, 133};  // of 144 work tiles on 132 SMs, or on 66 CTA pairs
      for (const std::vector<int>& outgrown : {none, first, later}) {
        AttentionInputs inputs = decode_inputs(spec, rows, shared.lengths, 33);
        for (const int row : outgrown) {
          if (row < inputs.q_tokens()) inputs.set_q(row, 7, 0, 8.0F / spec.softmax_scale);
        }
        if (!outgrown.empty()) inputs.set_k(keys - 2 * tile, 0, 0, 20.0F);
        expect_same_shared(with_prefixes(inputs, shared.prefix_of, shared.prefix_keys), shared, 64);
      }
    }
  }
}

// Fewer work tiles than the lengths allow, so that some CTAs have none; or no work tile at all.
TEST_P(DecodePrefixes, WorkTilesForFew) {
  for (const Dims& dims : dims_of_forms()) {
    const AttentionSpec spec = make_spec(dims, 8, 2, {-1, 0});
    const std::int64_t group = group_of(spec);
    Shared few{{group + 20, group + 75}, {0, 0}, {static_cast<std::int32_t>(group)}};
    for (int s = 0; s < 38; ++s) {
      few.lengths.push_back(20 + 3 * s);
      few.prefix_of.push_back(s % 2 - 1);
    }
    expect_same_shared(spec, 16, few, 35);
    expect_same_shared(spec, 2, {{group + 5, group + 6}, {0, 0}, {300}}, 36);
    expect_same_shared(spec, 2, {{500, 400}, {0, 0}, {300}}, 37);
  }
}

// Rows that exceed the rescale threshold inside a prefix, and what isn't finite there.
TEST_P(DecodePrefixes, RowsThatExceedTheRescaleThreshold) {
  for (const Dims& dims : dims_of_forms()) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    const std::int64_t group = group_of(spec);
    const Shared shared{{2 * group + 50, 2 * group + 8}, {0, 0}, {static_cast<std::int32_t>(2 * group)}};
    AttentionInputs inputs = decode_inputs(spec, 3, shared.lengths, 41);
    for (int head = 0; head < spec.heads; head += 2) {
      inputs.set_q(1, head, 0, 1.0F / spec.softmax_scale);
      inputs.set_q(5, head, 0, 0.5F / spec.softmax_scale);
    }
    for (const auto& [key, level] : {std::pair{std::int64_t{700}, 120.0F},
                                     {std::int64_t{701}, 90.0F},
                                     {group - 1, 400.0F},
                                     {group + 900, 80.0F}}) {
      for (int head = 0; head < spec.kv_heads; ++head) inputs.set_k(key, head, 0, level);
    }
    inputs.set_v(group + 5, 1, 2, std::numeric_limits<float>::infinity());
    inputs.set_v(2 * group - 1, 0, 1, std::numeric_limits<float>::quiet_NaN());
    inputs.set_k(group + 100, 1, 3, std::numeric_limits<float>::quiet_NaN());
    expect_same_shared(with_prefixes(inputs, shared.prefix_of, shared.prefix_keys), shared, 64);
  }
}

// The same in an incomplete KV split that sequences continue: rows exceed the threshold in the prefix's tiles, in their
// own, or in both.
TEST_P(DecodePrefixes, RowsThatExceedTheRescaleThresholdInTheCurrentKvSplit) {
  for (const Dims& dims : dims_of_forms()) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    const std::int64_t group = group_of(spec);
    const std::int64_t tile = group / kTilesPerKvSplit;
    for (const std::int64_t whole : {std::int64_t{0}, group}) {
      const std::int64_t keys = whole + 6 * tile + 17;
      const Shared shared{{keys + 900, keys + 500, keys + 7}, {0, 0, 0}, {static_cast<std::int32_t>(keys)}};
      for (const int where : {1, 2, 3}) {
        for (const int rows : {1, 10}) {
          AttentionInputs inputs = decode_inputs(spec, rows, shared.lengths, 43);
          for (int row = 0; row < inputs.q_tokens(); row += 2) {
            inputs.set_q(row, row / 2 % spec.heads, 0, 1.0F / spec.softmax_scale);
          }
          for (int head = 0; head < spec.kv_heads; ++head) {
            if (where % 2 == 1) inputs.set_k(whole + 3 * tile + 5, head, 0, 120.0F);
            if (where < 2) continue;
            inputs.set_k(keys + 400, head, 0, 300.0F);
            inputs.set_k(inputs.k_begin(1) + keys + 2, head, 0, 250.0F);
          }
          inputs.set_v(whole + tile, 1, 2, std::numeric_limits<float>::infinity());
          inputs.set_v(keys - tile, 0, 1, std::numeric_limits<float>::quiet_NaN());
          expect_same_shared(with_prefixes(inputs, shared.prefix_of, shared.prefix_keys), shared, 64);
        }
      }
    }
  }
}

// Rows that have no softmax_offset yet where the prefix ends: all of their scores in the KV split are −∞ up to there.
TEST_P(DecodePrefixes, RowsThatSeeNothingInAPrefix) {
  for (const Dims& dims : dims_of_forms()) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    const std::int64_t keys = group_of(spec) + 400;
    const Shared shared{{keys + 300, keys + 40}, {0, 0}, {static_cast<std::int32_t>(keys)}};
    for (const int rows : {2, 12}) {
      AttentionInputs inputs = decode_inputs(spec, rows, shared.lengths, 47);
      for (int row = 0; row < inputs.q_tokens(); ++row) {
        for (int head = 2; head < spec.heads; ++head) inputs.set_q(row, head, 0, 1.0F);  // those of KV head 1
      }
      for (std::int64_t key = keys - 400; key < keys; ++key) {
        inputs.set_k(key, 1, 0, -std::numeric_limits<float>::infinity());
      }
      expect_same_shared(with_prefixes(inputs, shared.prefix_of, shared.prefix_keys), shared, 16);
    }
  }
}

// The same step over and over, while sequences grow: they come to share their prefix once they are long enough.
TEST_P(DecodePrefixes, GrowingSequences) {
  const AttentionSpec spec = make_spec(dims_of_forms().back(), 4, 1, {-1, 0});
  const std::int64_t group = group_of(spec);
  for (const std::int64_t keys : {group, group + 512, std::int64_t{640}}) {
    const Shared shared{{keys + 9, keys + 7, keys + 8, 30}, {0, 0, 0, 0}, {static_cast<std::int32_t>(keys)}};
    const AttentionInputs longest = inputs_of(spec, 2, shared, 51);
    for (const int slices : forms()) {
      CacheLayout layout = layout_of(shared, 64);
      layout.slices = slices;
      DecodeRunner runner(row(), longest, layout, 2);
      for (const std::int64_t less : {30, 11, 10, 9, 8, 7, 1, 0}) {
        std::vector<std::int64_t> lengths = shared.lengths;
        for (std::int64_t& length : lengths) length -= less;
        runner.set_lengths(lengths);
        EXPECT_TRUE(runner.run().same_bits(folded(shortened(longest, lengths)))) << less << ", slices " << slices;
      }
    }
  }
}

// Keys dealt to several caches: each partition computes its KV splits of the prefixes once.
TEST_P(DecodePrefixes, OverPartitions) {
  CaseChoice cases = choose_cases(2);
  for (const Dims& dims : dims_of_forms()) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    const std::int64_t group = group_of(spec);
    const Shared shared = ragged(group);
    const AttentionInputs inputs = inputs_of(spec, 2, shared, 61);
    const AttentionResult expected = folded(inputs);
    for (const int count : {2, 3, 5}) {
      if (!cases.take()) continue;
      std::vector<std::unique_ptr<DecodeRunner>> runners;
      std::vector<const float*> records;
      for (int i = 0; i < count; ++i) {
        CacheLayout layout = layout_of(shared, 128);
        layout.partition = {i, count};
        runners.push_back(std::make_unique<DecodeRunner>(row(), inputs, layout));
        runners.back()->make_partials(
            splits_per_partition(3 * group + 7, count, runners.back()->kernel().kv_split_keys()));
        runners.back()->enqueue_leave(runners.back()->backend().stream());
        runners.back()->wait();
        records.push_back(runners.back()->partials());
      }
      runners[1]->enqueue_merge(records, runners[1]->backend().stream());
      const AttentionResult got = runners[1]->read();
      EXPECT_TRUE(got.same_bits(expected)) << count << " shares: " << first_difference(got, expected, spec);
    }
  }
}

TEST_P(DecodePrefixes, RefusesThoseOfADenseCache) {
  const AttentionInputs inputs = decode_inputs(make_spec(first_dims(), 2, 1, {-1, 0}), 1, {50, 60}, 71);
  const CacheLayout dense{.prefix_of = {0, 0}, .prefix_keys = {40}};
  const Error error = error_of([&] { DecodeRunner(row(), inputs, dense).run(); });
  count_check();
  EXPECT_EQ(error.code(), ErrorCode::kInternal) << error.what();
}

RINGATTN_FOR_EVERY_DECODER(DecodePrefixes);

}  // namespace
}  // namespace ringattn::testing
