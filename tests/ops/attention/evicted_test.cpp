// SPDX-License-Identifier: Apache-2.0
// Attention over a cache with evicted tokens: each row of a head equals, by memcmp, plain attention over only that
// head's kept tokens, of which it sees those that the mask lets through at their positions. The same holds on any
// number of ranks, in chunks, and decoded. fp64 of the whole cache with the others masked agrees.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "attention/tokens/cost.hpp"
#include "comm/self.hpp"
#include "ops/decode/decode.hpp"
#include "tests/support/decode_rank.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/evicted_job.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

Options on_the_cpu(std::int64_t block = 0) {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  options.block_tokens = block;
  return options;
}

JobResult alone(const Job& job, const JobTensors& tensors) { return run_job(job, on_the_cpu(), tensors, 1); }

const std::vector<Sequence> kRagged = {{90, 300, 210}, {40, 40, 0},   {0, 5, 0},   {3, 0, 0},
                                       {33, 257, 100}, {20, 90, 120}, {25, 60, -9}};

std::vector<Job> jobs() {
  AttentionSpec everything = make_spec(Dtype::kBf16, 4, 2, 32, {37, 21}, 16);
  everything.softcap = 20.0F;
  everything.sinks = true;
  return {{make_spec(Dtype::kBf16, 4, 2, 32, {-1, 0}), kRagged},
          {make_spec(Dtype::kF32, 2, 2, 16, {9, 0}), kRagged},
          {everything, kRagged},
          {make_spec(Dtype::kF32, 2, 1, 16, {-1, -1}), kRagged}};
}

void expect_same_everywhere(const Job& job, const JobTensors& tensors, const JobResult& reference) {
  for (int world = 1; world <= 5; ++world) {
    for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
      Options options = on_the_cpu(kind == LayoutKind::kZigzag ? 128 : 0);
      options.layout.kind = kind;
      options.checksum = kind == LayoutKind::kZigzag;
      EXPECT_TRUE(run_job(job, options, tensors, world).same_bits(reference))
          << describe(job) << ": " << layout_name(kind) << ", world " << world;
    }
    Options odd = on_the_cpu(256);
    odd.layout.stripe = 37;
    const ThreadsDelivery shuffled{world % 2 == 0 ? Route::kChain : Route::kDirect, 5, std::chrono::microseconds(200)};
    EXPECT_TRUE(run_job(job, odd, tensors, world, shuffled).same_bits(reference)) << describe(job) << ": " << world;
  }
}

TEST(EvictedJobs, AreAttentionOverTheKeptTokens) {
  std::uint64_t seed = 1;
  for (const Job& whole : jobs()) {
    // With few tokens some queries see none, between others that see one.
    for (const auto& [heads, ratio] : {std::pair{1, 0.4}, {whole.spec.kv_heads, 0.4}, {whole.spec.kv_heads, 0.95}}) {
      const Evicted evicted(whole, ratio, heads, ++seed);
      const Job job = evicted.placed();
      EXPECT_EQ(job.positions == nullptr, whole.spec.mask.is_full()) << describe(job);
      const JobResult result = run_job(job, on_the_cpu(), evicted.tensors, 1);
      EXPECT_TRUE(result.same_bits(by_definition(evicted, alone))) << describe(job);
      expect_right(evicted, result);
      expect_same_everywhere(job, evicted.tensors, result);
    }
  }
}

// More tiles than a KV split holds, with windows that begin anywhere.
TEST(EvictedJobs, OfSeveralKvSplits) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{14000, 0}}) {
    const std::int64_t keys = 128 * 140 + 50;
    const Evicted evicted({make_spec(Dtype::kBf16, 2, 1, 16, mask), {{70, keys, keys / 2}, {3, keys, keys - 40}}}, 0.25,
                          1, 5);
    const Job job = evicted.placed();
    EXPECT_NE(job.positions, nullptr);
    const JobResult result = run_job(job, on_the_cpu(), evicted.tensors, 1);
    EXPECT_TRUE(result.same_bits(by_definition(evicted, alone)));
    for (const int world : {2, 3, 5}) {
      for (const std::int64_t block : {0, 1280, 128 * 64}) {
        EXPECT_TRUE(run_job(job, on_the_cpu(block), evicted.tensors, world).same_bits(result))
            << world << ", " << block;
      }
    }
  }
}

TEST(EvictedJobs, ThatKeepEverythingAreTheJob) {
  for (const Job& whole : jobs()) {
    const Evicted evicted(whole, 0.0, whole.spec.kv_heads, 3);
    const JobResult plain = run_job(whole, on_the_cpu(), evicted.all, 1);
    EXPECT_EQ(evicted.tensors.k, evicted.all.k);
    EXPECT_TRUE(run_job(evicted.placed(), on_the_cpu(), evicted.tensors, 3).same_bits(plain)) << describe(whole);
    // With positions that say no more than the mask does.
    Job kept = evicted.job;
    kept.positions = evicted.positions;
    kept.spec.positions = evicted.positions->heads();
    EXPECT_TRUE(run_job(kept, on_the_cpu(), evicted.tensors, 2).same_bits(plain)) << describe(whole);
    EXPECT_NEAR(job_flops(kept), job_flops(whole), 1e-9 * job_flops(whole));
  }
}

// Behind the tokens that were taken out any kernel and any op class computes rows: queries are moved, positions go.
// The bits are those with positions, of a prompt in one piece or in chunks.
TEST(EvictedJobs, BehindTheirGapsArePlain) {
  for (const int heads : {1, 2}) {
    const Evicted evicted({make_spec(Dtype::kBf16, 4, 2, 32, {-1, 0}), {{200, 900, 700}, {129, 700, 571}}}, 0.5, heads,
                          7,
                          /*recent=*/140);
    const Job whole = evicted.placed();
    EXPECT_NE(whole.positions, nullptr);  // queries among tokens that were taken out
    const JobResult result = run_job(whole, on_the_cpu(), evicted.tensors, 1);
    // The last 100 queries of each.
    Evicted last = evicted;
    std::vector<Sequence> sequences;
    std::vector<std::byte> q;
    std::vector<std::byte> expected;
    const std::vector<std::int64_t> cu = whole.batch.cu_q();
    const auto row = static_cast<std::int64_t>(2 * 4 * 32);
    for (std::size_t s = 0; s < 2; ++s) {
      const Sequence& of = evicted.job.batch.sequences[s];
      sequences.push_back({100, of.k_len, of.q_offset + of.q_len - 100});
      q.insert(q.end(), evicted.tensors.q.begin() + (cu[s + 1] - 100) * row,
               evicted.tensors.q.begin() + cu[s + 1] * row);
      expected.insert(expected.end(), result.out.begin() + (cu[s + 1] - 100) * row,
                      result.out.begin() + cu[s + 1] * row);
    }
    last.job.batch = sequences;
    last.tensors.q = q;
    const Job moved = last.placed();
    EXPECT_EQ(moved.positions, nullptr);
    EXPECT_EQ(moved.spec.positions, 0);
    EXPECT_EQ(moved.batch.sequences[0].q_offset, sequences[0].k_len - 100);
    for (const int world : {1, 3}) {
      EXPECT_EQ(run_job(moved, on_the_cpu(), last.tensors, world).out, expected) << world;
    }
  }
}

// A step over the compacted cache, dense or in pages, on 1 to 5 ranks: the rows of the prefill with positions.
TEST(EvictedJobs, DecodeAsTheyPrefill) {
  const Evicted evicted(
      {make_spec(Dtype::kBf16, 4, 2, 32, {-1, 0}), {{300, 900, 600}, {40, 300, 260}, {3, 17000, 16997}}}, 0.4, 2, 9,
      /*recent=*/3);
  const Job placed = evicted.placed();
  ASSERT_NE(placed.positions, nullptr);
  const JobResult prefill = run_job(placed, on_the_cpu(), evicted.tensors, 1);
  Evicted step = evicted;
  std::vector<Sequence> sequences;
  step.tensors.q.clear();
  JobResult expected;
  const std::vector<std::int64_t> cu = placed.batch.cu_q();
  const auto row = static_cast<std::int64_t>(2 * 4 * 32);
  std::vector<std::int64_t> lengths;
  for (std::size_t s = 0; s < 3; ++s) {
    const Sequence& of = evicted.job.batch.sequences[s];
    sequences.push_back({3, of.k_len, of.q_offset + of.q_len - 3});
    lengths.push_back(of.k_len);
    const auto take = [&](const auto& from, auto& to, std::int64_t each) {
      to.insert(to.end(), from.begin() + (cu[s + 1] - 3) * each, from.begin() + cu[s + 1] * each);
    };
    take(evicted.tensors.q, step.tensors.q, row);
    take(prefill.out, expected.out, row);
    take(prefill.lse, expected.lse, 4);
  }
  step.job.batch = sequences;
  const Job moved = step.placed();
  ASSERT_EQ(moved.positions, nullptr);
  for (const std::int64_t page : {0, 16, 128}) {
    for (int world = 1; world <= 5; ++world) {
      const auto rank_main = [&](Transport& transport) {
        DecodeOptions options;
        options.kernel.backend = "cpu";
        options.threads = 1;
        const CacheLayout layout{.page_size = page, .shuffle = 3};
        Decode decode(decode_job(moved, 3, layout), transport, options);
        DecodeRank rank(decode, moved, step.tensors, layout);
        rank.fill(lengths);
        rank.load(lengths, 3);
        decode.run(rank.inputs(false, false), rank.outputs());
        EXPECT_EQ(rank.difference(expected), "") << "page " << page << ", rank " << transport.rank() << " of " << world;
      };
      if (world == 1) {
        rank_main(*make_self_transport());
      } else {
        run_threads_world(world, {}, rank_main);
      }
    }
  }
}

TEST(EvictedJobs, RanksMustAgreeOnThePositions) {
  const Evicted one({make_spec(Dtype::kBf16, 2, 1, 32, {-1, 0}), {{600, 600, 0}}}, 0.5, 1, 1);
  const Evicted other({make_spec(Dtype::kBf16, 2, 1, 32, {-1, 0}), {{600, 600, 0}}}, 0.5, 1, 2);
  const auto error = error_of([&] {
    run_threads_world(2, {}, [&](Transport& transport) {
      Attention((transport.rank() == 0 ? one : other).placed(), transport, on_the_cpu());
    });
  });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(error.what()).find("job"), std::string::npos) << error.what();
}

TEST(EvictedJobs, BadOnesAreRefused) {
  const Evicted evicted({make_spec(Dtype::kBf16, 4, 2, 32, {-1, 0}), {{600, 600, 0}}}, 0.5, 2, 1);
  const auto refused = [](const Job& job) { return error_of([&] { check_job(job); }).code() == ErrorCode::kUsage; };
  Job missing = evicted.placed();
  check_job(missing);
  missing.positions = nullptr;
  EXPECT_TRUE(refused(missing));
  Job others = evicted.placed();
  others.batch = std::vector<Sequence>{{600, 299, 0}};
  EXPECT_TRUE(refused(others));
  Job heads = evicted.placed();
  heads.spec.heads = heads.spec.kv_heads = heads.spec.positions * 2;
  EXPECT_TRUE(refused(heads));
  Job shorter = evicted.job;
  shorter.batch = std::vector<Sequence>{{600, 299, 0}};
  EXPECT_EQ(error_of([&] { set_positions(shorter, evicted.positions); }).code(), ErrorCode::kUsage);
  // A step reads no positions.
  DecodeJob step = decode_job(evicted.job, 1, {});
  step.spec.positions = 2;
  const auto error = error_of([&] { choose_kernel(DecodeSpec{step.spec, {}}, {"cpu", "auto"}); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(error.what()).find("key positions (supported:"), std::string::npos);
}

}  // namespace
}  // namespace ringattn::testing
