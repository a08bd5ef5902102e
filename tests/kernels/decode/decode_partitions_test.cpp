// SPDX-License-Identifier: Apache-2.0
// Steps whose keys were dealt to several caches by KV splits: the partials of each, merged, are the step over the
// whole cache, and attention, by memcmp of O and LSE, for every kernel that decodes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "tests/kernels/decode/decode_row_test.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr int kShareCounts[] = {1, 2, 3, 4, 5};
constexpr std::int64_t kPages[] = {0, 16, 64, 256, 32, 128};  // of partitions in turn; 0: dense

class DecodePartitions : public DecodeRowTest {
 protected:
  std::int64_t group_of(const AttentionSpec& spec) const {
    return std::int64_t{kTilesPerKvSplit} * AttentionRunner(attention_row(), spec).kernel().key_tile();
  }

  // A runner for each partition of `count`, with caches of different layouts that can hold `spare` KV splits more than
  // needed.
  std::vector<std::unique_ptr<DecodeRunner>> deal(const AttentionInputs& inputs, int count,
                                                  std::int64_t spare = 0) const {
    std::int64_t longest = 0;
    for (const SequenceShape& shape : inputs.sequences) longest = std::max(longest, shape.k_len);
    std::vector<std::unique_ptr<DecodeRunner>> runners;
    for (int i = 0; i < count; ++i) {
      const CacheLayout layout{.page_size = kPages[static_cast<std::size_t>(i + count) % std::size(kPages)],
                               .head_major = i % 2 == 1,
                               .partition = {i, count}};
      runners.push_back(std::make_unique<DecodeRunner>(row(), inputs, layout, 1 + i % 2));
      runners.back()->make_partials(splits_per_partition(longest, count, runners.back()->kernel().kv_split_keys()) +
                                    spare);
    }
    return runners;
  }

  // Every partition writes its partials; partition `merger` merges them.
  static AttentionResult merged(const std::vector<std::unique_ptr<DecodeRunner>>& runners, std::size_t merger) {
    std::vector<const float*> shares;
    for (const auto& runner : runners) {
      runner->enqueue_leave(runner->backend().stream());
      runner->wait();
      shares.push_back(runner->partials());
    }
    runners[merger]->enqueue_merge(shares, runners[merger]->backend().stream());
    return runners[merger]->read();
  }

  void expect_same_dealt(const AttentionInputs& inputs) {
    const AttentionResult expected = folded(inputs);
    EXPECT_TRUE(DecodeRunner(row(), inputs).run().same_bits(expected)) << describe(inputs.spec);
    for (const int count : kShareCounts) {
      if (!counts_.take()) continue;
      const auto runners = deal(inputs, count, count % 2);
      EXPECT_TRUE(merged(runners, static_cast<std::size_t>(count) / 2).same_bits(expected))
          << describe(inputs.spec) << ", " << inputs.sequences[0].q_len << " rows, " << count << " shares";
    }
  }

 private:
  CaseChoice counts_ = choose_cases(2);
};

// Ragged lengths around the edges of KV splits, without keys too, so that some partitions have nothing of some
// sequences.
TEST_P(DecodePartitions, EveryConfiguration) {
  std::uint64_t seed = 1;
  for (const Dims& dims : dims()) {
    const Mask masks[] = {{-1, 0}, {-1, -1}, {9000, 0}, {150, 20}};
    AttentionSpec spec = make_spec(dims, 4, 2, masks[seed % std::size(masks)]);
    spec.sinks = seed % 2 == 0;
    spec.softcap = seed % 3 == 0 ? 15.0F : 0.0F;
    const std::int64_t group = group_of(spec);
    expect_same_dealt(decode_inputs(spec, seed % 2 == 0 ? 1 : 4, {2 * group + 65, 0, group + 1, 7}, seed));
    ++seed;
  }
}

// KV splits outside the window have no partials, and neither have rows without a key: those complete all the same. Rows
// of one step belong to two query tiles where their sequence ends a little after the edge of one.
TEST_P(DecodePartitions, EveryMask) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}, Mask{0, 0}, Mask{300, 0}, Mask{9000, 40}, Mask{-1, 5}}) {
    AttentionSpec spec = make_spec(first_dims(), 3, 1, mask);
    spec.sinks = mask.left == 300;
    const std::int64_t group = group_of(spec);
    expect_same_dealt(decode_inputs(spec, 1, {5 * group + 130, 1, 2 * group, 0}, 11));
    expect_same_dealt(decode_inputs(spec, 13, {4 * group + 5, 0, 6, group + 7, 300}, 12));
  }
}

// The merge step moves its softmax_offset in a KV split of another partition than the one before.
TEST_P(DecodePartitions, RowsThatExceedTheRescaleThreshold) {
  for (const Dims& dims : usual_dims(attention_row())) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    const std::int64_t group = group_of(spec);
    AttentionInputs inputs = decode_inputs(spec, 2, {4 * group - 9}, 21);
    for (int head = 0; head < spec.heads; head += 2) inputs.set_q(1, head, 0, 1.0F / spec.softmax_scale);
    for (const auto& [key, level] : {std::pair{group + 70, 60.0F}, {2 * group + 500, 130.0F}, {3 * group + 1, 90.0F}}) {
      for (int head = 0; head < spec.kv_heads; ++head) inputs.set_k(key, head, 0, level);
    }
    inputs.set_v(group + 5, 1, 2, std::numeric_limits<float>::infinity());
    inputs.set_v(3 * group + 5, 0, 1, std::numeric_limits<float>::quiet_NaN());
    expect_same_dealt(inputs);
  }
}

// A step that writes partials writes nothing else. The same buffer is reused when sequences have new lengths.
TEST_P(DecodePartitions, GrowingSequences) {
  const AttentionSpec spec = make_spec(first_dims(), 2, 1, {-1, 0});
  const std::int64_t group = group_of(spec);
  const AttentionInputs longest = decode_inputs(spec, 2, {2 * group + 3, 40}, 31);
  const auto runners = deal(longest, 2);
  for (const std::int64_t less : {group + 5, group + 1, group, std::int64_t{6}, std::int64_t{3}, std::int64_t{0}}) {
    const std::vector<std::int64_t> lengths = {2 * group + 3 - less, std::max<std::int64_t>(0, 40 - less)};
    for (const auto& runner : runners) runner->set_lengths(lengths);
    EXPECT_TRUE(merged(runners, 1).same_bits(folded(shortened(longest, lengths)))) << less;
    const AttentionResult other = runners[0]->read();
    EXPECT_TRUE(std::ranges::all_of(other.out, [](std::byte byte) { return byte == std::byte{0xff}; }));
  }
}

// Rows can't end with a step over a part of their keys.
TEST_P(DecodePartitions, RefusesToFinishAPartition) {
  const AttentionInputs inputs = decode_inputs(make_spec(first_dims(), 2, 1, {-1, 0}), 1, {50}, 41);
  for (const KvPartition& partition : {KvPartition{0, 2}, KvPartition{2, 2}, KvPartition{0, 0}}) {
    const Error error = error_of([&] { DecodeRunner(row(), inputs).run_partition(partition); });
    count_check();
    EXPECT_EQ(error.code(), ErrorCode::kInternal) << error.what();
  }
}

RINGATTN_FOR_EVERY_DECODER(DecodePartitions);

}  // namespace
}  // namespace ringattn::testing
