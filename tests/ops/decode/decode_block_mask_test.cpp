// SPDX-License-Identifier: Apache-2.0
// Decode steps with a block mask, given or selected by the step: they have the bits of Attention with the same mask, by
// memcmp of O and LSE; invalid masks are found, and nothing is changed.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "ops/decode/decode.hpp"
#include "tests/support/block_mask_steps.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr int kBlock = 128;

DecodeOptions on_cpu() {
  DecodeOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

DecodeJob job_with_block_mask(const BlockMaskSteps& steps, int rows, const CacheLayout& layout,
                              const BlockMaskShape& shape, int best = 0) {
  DecodeJob job = decode_job(steps.job(), rows, layout);
  job.spec.block_mask = shape;
  job.top_k_blocks = best;
  return job;
}

std::vector<std::int64_t> less(std::vector<std::int64_t> lengths, std::int64_t by) {
  for (std::int64_t& length : lengths) length -= by;
  return lengths;
}

TEST(DecodeWithBlockMask, HasTheBitsOfAttentionByThem) {
  std::uint64_t seed = 1;
  for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}}) {
    for (const int heads : {1, 2}) {
      AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 16, mask);
      spec.sinks = seed % 2 == 0;
      const std::vector<std::int64_t> lengths = {8192 + 8 * kBlock + 3, 5 * kBlock, 3, 20 * kBlock + 70};
      const BlockMaskSteps steps(spec, lengths, seed, "cpu");
      const BlockMaskShape shape{64, heads == 1 ? kBlock : 2 * kBlock, heads};
      const auto lists = steps.block_mask(shape, lengths, 3, random_blocks(shape, mask, 9, seed));
      const CacheLayout layout{.page_size = seed % 2 == 0 ? 16 : 0};
      const auto self = make_self_transport();
      Decode decode(job_with_block_mask(steps, 3, layout, shape), *self, on_cpu());
      DecodeRank rank(decode, steps.job(), steps.tensors(), layout);
      rank.set_block_mask(*lists, 3);
      rank.fill(less(lengths, 3));
      rank.load(lengths, 3);
      decode.run(rank.inputs(true, true), rank.outputs());
      EXPECT_EQ(rank.difference(steps.attended(lists, lengths, 3)), "") << seed;
      ++seed;
    }
  }
}

// Steps over `lengths` with a block mask, or by blocks that they select, on several ranks: what each rank gives is what
// one rank gives, and it follows nothing of sequences that it doesn't keep.
void expect_same_on_ranks(const AttentionSpec& spec, const std::vector<std::int64_t>& lengths,
                          const BlockMaskShape& shape, int best, std::initializer_list<int> worlds,
                          int head_parts = 0) {
  const BlockMaskSteps steps(spec, lengths, 11, "cpu");
  const auto lists = best > 0 ? steps.best(shape, lengths, 1, best)
                              : steps.block_mask(shape, lengths, 1, random_blocks(shape, {}, 3, 7));
  const JobResult expected = steps.attended(lists, lengths, 1);
  const auto sequences = static_cast<std::int64_t>(lengths.size());
  for (const int ranks : worlds) {
    for (const std::int64_t page : {0, 32}) {
      const CacheLayout layout{.page_size = page, .head_major = ranks % 2 == 0};
      std::atomic<std::int64_t> compared = 0;
      const auto rank_main = [&](Transport& world) {
        DecodeJob job = job_with_block_mask(steps, 1, layout, shape, best);
        job.head_parts = head_parts;
        Decode decode(job, world, on_cpu());
        DecodeRank rank(decode, steps.job(), steps.tensors(), layout);
        if (best == 0) rank.set_block_mask(*lists, 1);
        rank.fill(less(lengths, 1));
        const SequenceRange kept = decode.kept(sequences);
        const auto own_lists = static_cast<std::int64_t>(rank.list_counts.size()) / sequences;
        for (std::int64_t s = 0; s < sequences; ++s) {
          if (s >= kept.first && s < kept.end()) continue;
          for (std::int64_t i = 0; i < rank.table_pages; ++i) {
            rank.table[static_cast<std::size_t>(s * rank.table_pages + i)] = -5;  // never followed
          }
          if (best == 0) rank.list_counts[static_cast<std::size_t>(own_lists * s)] = -9;
        }
        rank.upload();
        rank.load(less(lengths, 1), 1);
        if (best > 0) decode.update_mean_keys(rank.inputs(false, false));
        rank.load(lengths, 1);
        decode.run(rank.inputs(true, true), rank.outputs());
        EXPECT_EQ(rank.difference(expected), "") << ranks << " ranks, page " << page << ", best " << best;
        EXPECT_EQ(rank.lengths_now(), std::vector<std::int32_t>(lengths.begin(), lengths.end()));
        compared += decode.owned(sequences).count;
      };
      if (ranks > 1) {
        run_threads_world(ranks, {}, rank_main);
      } else {
        rank_main(*make_self_transport());
      }
      EXPECT_EQ(compared, sequences);
    }
  }
}

// Two and four ranks share the two K/V heads, four ranks also share the five sequences, and odd numbers share only
// sequences.
TEST(DecodeWithBlockMask, OnSeveralRanks) {
  AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 16, {-1, 0});
  const std::vector<std::int64_t> lengths = {9 * kBlock + 3, 5 * kBlock, 40, 20 * kBlock + 70, 7 * kBlock + 1};
  for (const int heads : {1, 2}) {
    for (const int best : {0, 4}) expect_same_on_ranks(spec, lengths, {64, kBlock, heads}, best, {1, 2, 3, 4, 5, 7});
    spec.sinks = true;
  }
}

// One sequence, whose mask rows are two KV splits of tiles: ranks deal its heads, as evenly as they can. Of four ranks
// two have no keys to attend to, as there are three heads.
TEST(DecodeWithBlockMask, OfASingleSequenceOnSeveralRanks) {
  AttentionSpec spec = make_spec(Dtype::kBf16, 6, 3, 16, {-1, 0}, 32);
  spec.sinks = true;
  for (const int heads : {1, 3}) {
    const BlockMaskShape shape{64, kBlock, heads};
    expect_same_on_ranks(spec, {8192 + 9 * kBlock + 5}, shape, 66, {2, 3, 4, 6});
    expect_same_on_ranks(spec, {12 * kBlock + 5}, shape, 0, {2, 3, 4, 5});
  }
}

// Ranks deal what they are told to, though sequences come out even.
TEST(DecodeWithBlockMask, OnRanksThatAreToldWhatToDeal) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 8, 4, 16, {-1, -1});
  for (const int parts : {1, 2, 4}) {
    expect_same_on_ranks(spec, {12 * kBlock + 5, 300}, {64, kBlock, 4}, 0, {4}, parts);
  }
}

// Steps that are smaller than the limits, of several rows; results with strides of their own, and without LSE.
TEST(DecodeWithBlockMask, OfSmallerStepsIntoStridedRows) {
  const AttentionSpec spec = make_spec(Dtype::kF16, 4, 2, 16, {-1, 0});
  const std::vector<std::int64_t> lengths = {9 * kBlock + 4, 300, 7 * kBlock + 9};
  const BlockMaskSteps steps(spec, lengths, 3, "cpu");
  const BlockMaskShape shape{64, kBlock, 2};
  const auto lists = steps.block_mask(shape, lengths, 3, random_blocks(shape, spec.mask, 3, 9));
  const JobResult expected = steps.attended(lists, lengths, 3);
  run_threads_world(2, {}, [&](Transport& world) {
    DecodeJob job = job_with_block_mask(steps, 4, {}, shape);
    job.limits.sequences = 5;
    Decode decode(job, world, on_cpu());
    DecodeRank rank(decode, steps.job(), steps.tensors(), {});
    rank.set_block_mask(*lists, 3);
    rank.fill(lengths);
    rank.load(lengths, 3);
    decode.run(rank.inputs(false, false), rank.outputs());
    EXPECT_EQ(rank.difference(expected), "");

    constexpr std::int64_t kHeadStride = 24, kTokenStride = 5 * kHeadStride;
    const std::int64_t rows = decode.owned(3).count * 3;
    std::vector<std::uint16_t> out(static_cast<std::size_t>(rows * kTokenStride), 0xffff);
    MutableTensorView view = dense_view(static_cast<void*>(out.data()), spec.dtype, rows, spec.heads, 16);
    view.token_stride = kTokenStride;
    view.head_stride = kHeadStride;
    decode.run(rank.inputs(false, false), {view, {}});
    decode.run(rank.inputs(false, false), rank.outputs());
    const TensorView dense = rank.outputs().out;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < 5; ++head) {
        const std::uint16_t* const at = out.data() + row * kTokenStride + head * kHeadStride;
        const bool is_head = head < spec.heads;
        EXPECT_TRUE(std::all_of(at + (is_head ? 16 : 0), at + kHeadStride, [](auto bits) { return bits == 0xffff; }));
        if (!is_head) continue;
        EXPECT_EQ(std::memcmp(at, dense.at(row, head), 32), 0) << row << ", " << head;
      }
    }
  });
}

TEST(DecodeWithBlockMask, RefusesPartsOfHeadsThatRanksCantDeal) {
  const BlockMaskSteps steps(make_spec(Dtype::kF32, 8, 4, 16, {-1, 0}), {700}, 3, "cpu");
  const auto refused = [&](int ranks, int parts, int lists, int best, std::string_view part) {
    run_threads_world(ranks, {}, [&](Transport& world) {
      DecodeJob job = job_with_block_mask(steps, 1, {}, {64, kBlock, lists}, best);
      job.head_parts = parts;
      const Error error = error_of([&] { Decode(job, world, on_cpu()); });
      EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    });
  };
  refused(3, 2, 4, 0, "3 ranks split K/V heads in 2 parts");
  refused(4, 4, 2, 0, "up to 2: K/V heads that share a block mask");
  refused(2, 2, 1, 5, "up to 1: ");
}

// A rank that gives all heads, or masks of all of them, is told what it keeps.
TEST(DecodeWithBlockMask, RefusesACacheOfAllHeads) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 4, 2, 16, {-1, 0});
  const BlockMaskSteps steps(spec, {700}, 3, "cpu");
  run_threads_world(2, {}, [&](Transport& world) {
    Decode decode(job_with_block_mask(steps, 1, {}, {64, kBlock, 2}), world, on_cpu());
    EXPECT_EQ(decode.kv_heads().first, world.rank());
    EXPECT_EQ(decode.kv_heads().count, 1);
    DecodeRank rank(decode, steps.job(), steps.tensors(), {});
    rank.set_block_mask(*steps.block_mask({64, kBlock, 2}, {700}, 1, all_blocks()), 1);
    rank.fill({700});
    rank.load({700}, 1);
    DecodeInputs all = rank.inputs(false, false);
    all.k.heads = all.v.heads = 2;
    const Error error = error_of([&] { decode.run(all, rank.outputs()); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("keeps the heads Decode::kv_heads()"), std::string::npos) << error.what();
    EXPECT_TRUE(rank.untouched());
  });
}

// The blocks that a step chooses are those that a prefill's mask selects, while sequences grow; pool() makes the means
// of what the cache holds to begin with.
TEST(DecodeWithBlockMask, ChoosesAsPrefillDoes) {
  for (const int heads : {1, 2}) {
    const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 32, {-1, 0});
    const std::vector<std::int64_t> longest = {16 * kBlock + 70, 9 * kBlock + 3, 150};
    const BlockMaskSteps steps(spec, longest, 5, "cpu");
    const BlockMaskShape shape{64, kBlock, heads};
    const CacheLayout layout{.page_size = heads == 1 ? 32 : 256};
    const auto self = make_self_transport();
    Decode decode(job_with_block_mask(steps, 1, layout, shape, 4), *self, on_cpu());
    DecodeRank rank(decode, steps.job(), steps.tensors(), layout);
    constexpr std::int64_t kSteps = 145;
    rank.fill(less(longest, kSteps));
    rank.load(less(longest, kSteps), 1);
    decode.update_mean_keys(rank.inputs(false, false));
    int dense = 0;
    for (std::int64_t left = kSteps - 1; left >= 0; --left) {
      const std::vector<std::int64_t> lengths = less(longest, left);
      rank.load(lengths, 1);
      decode.enqueue(rank.inputs(true, true), rank.outputs());
      decode.wait();
      if (left % 29 != 0 && lengths[0] % kBlock > 2) {
        rank.difference(poisoned_result(steps.job(), 1));  // the outputs are NaN again
        continue;
      }
      const auto lists = steps.best(shape, lengths, 1, 4);
      EXPECT_EQ(rank.difference(steps.attended(lists, lengths, 1)), "") << left;
      dense += steps.attended(lists, lengths, 1).same_bits(steps.attended(nullptr, lengths, 1)) ? 1 : 0;
    }
    EXPECT_EQ(dense, 0) << "all keys give the same: the test shows nothing";
  }
}

TEST(DecodeWithBlockMask, RefusesBlockMasksThatDontFit) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 4, 2, 16, {-1, 0});
  const std::vector<std::int64_t> lengths = {9 * kBlock, 700};
  const BlockMaskSteps steps(spec, lengths, 7, "cpu");
  const BlockMaskShape shape{64, kBlock, 2};
  const CacheLayout layout{.page_size = 64};
  const auto self = make_self_transport();
  Decode decode(job_with_block_mask(steps, 1, layout, shape), *self, on_cpu());
  DecodeRank rank(decode, steps.job(), steps.tensors(), layout);
  const auto lists = steps.block_mask(shape, lengths, 1, random_blocks(shape, spec.mask, 4, 7));
  const auto refused = [&](const std::function<void()>& spoil, const std::vector<std::string>& parts) {
    rank.set_block_mask(*lists, 1);
    rank.fill(lengths);
    rank.load(lengths, 1);
    spoil();
    rank.upload();
    const Error error = error_of([&] { decode.run(rank.inputs(false, false), rank.outputs()); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\nlacks: " << part;
    }
    EXPECT_TRUE(rank.untouched());
  };
  refused([&] { rank.list_counts[3] = 12; }, {"mask row 1 of sequence 1 has 12 blocks", "at most 10"});
  refused([&] { rank.list_counts[0] = -1; }, {"mask row 0 of sequence 0 has -1 blocks"});
  refused([&] { std::swap(rank.list_blocks[10], rank.list_blocks[11]); },
          {"mask row 1 of sequence 0 has block", "ascend"});
  refused([&] { rank.list_blocks[0] = -2; }, {"mask row 0 of sequence 0 has block -2 at index 0"});
  DecodeInputs without = rank.inputs(false, false);
  without.block_mask = {};
  EXPECT_NE(std::string(error_of([&] { decode.run(without, rank.outputs()); }).what()).find("the block mask is"),
            std::string::npos);
}

TEST(DecodeWithBlockMask, RefusesJobsThatContradictThemselves) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 4, 2, 16, {-1, 0});
  const BlockMaskSteps steps(spec, {700}, 8, "cpu");
  const auto self = make_self_transport();
  const auto code = [&](const std::function<void(DecodeJob&)>& spoil, std::string_view part) {
    DecodeJob job = job_with_block_mask(steps, 1, {.page_size = 64}, {64, kBlock, 2}, 5);
    spoil(job);
    const Error error = error_of([&] { Decode(job, *self, on_cpu()); });
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    return error.code();
  };
  EXPECT_EQ(code([](DecodeJob& job) { job.limits.prefixes = 1; }, "share prefixes"), ErrorCode::kUsage);
  EXPECT_EQ(code([](DecodeJob& job) { job.spec.block_mask = {}; }, "top 5 blocks"), ErrorCode::kUsage);
  EXPECT_EQ(code([](DecodeJob& job) { job.spec.block_mask.heads = 4; }, "each query head"), ErrorCode::kUnsupported);
  EXPECT_EQ(code([](DecodeJob& job) { job.head_parts = -1; }, "split in -1 parts"), ErrorCode::kUsage);
  EXPECT_EQ(code([](DecodeJob& job) { job.head_parts = 2; }, "1 ranks split K/V heads in 2 parts"), ErrorCode::kUsage);
  const auto no_lists = [](DecodeJob& job) {
    job.spec.block_mask = {};
    job.top_k_blocks = 0;
    job.head_parts = 1;
  };
  EXPECT_EQ(code(no_lists, "ranks split heads only with a block mask"), ErrorCode::kUsage);
  EXPECT_EQ(code([](DecodeJob& job) { job.spec.block_mask.key_block = 100; }, "multiples of"), ErrorCode::kUnsupported);
  EXPECT_EQ(code([](DecodeJob& job) { job.spec.mask = {300, 0}; }, "sliding window"), ErrorCode::kUnsupported);
  Decode dense(decode_job(steps.job(), 1, {}), *self, on_cpu());
  DecodeRank rank(dense, steps.job(), steps.tensors(), {});
  rank.load({700}, 1);
  EXPECT_EQ(error_of([&] { dense.update_mean_keys(rank.inputs(false, false)); }).code(), ErrorCode::kUsage);
}

}  // namespace
}  // namespace ringattn::testing
