// SPDX-License-Identifier: Apache-2.0
// Jobs over caches with evicted tokens on GPUs, over every attention kernel of the cuda backend that knows positions of
// keys: those that keep everything are the job, others give the bits of one rank on several, in any layout, blocks and
// pages, and fp64 agrees.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "tests/support/evicted_job.hpp"
#include "tests/support/gpu_rows.hpp"
#include "tests/support/paged_rank.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

constexpr int kDim = 128;

const std::vector<Sequence> kRagged = {{300, 700, 300}, {40, 40, 0},    {0, 5, 0},    {3, 0, 0},
                                       {133, 257, 100}, {20, 290, 330}, {25, 60, -9}, {1, 1, 0}};

class GpuEvicted : public GpuRowTest {
 protected:
  void SetUp() override {
    GpuRowTest::SetUp();
    if (IsSkipped()) return;
    AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, kDim, {-1, 0});
    spec.positions = 2;
    if (!able(spec)) GTEST_SKIP() << GetParam().name << " has no kernel for positions of keys";
  }

  JobResult alone(const Job& job, const JobTensors& tensors) const { return run_gpu_job(job, options(), tensors, 1); }
  Options shaped(LayoutKind kind, std::int64_t stripe, std::int64_t block) const {
    Options asked = options(block);
    asked.layout = {kind, stripe};
    return asked;
  }
};

TEST_P(GpuEvicted, HaveTheSameBitsOnAnyNumberOfRanks) {
  AttentionSpec everything = make_spec(Dtype::kBf16, 4, 2, kDim, {137, 21});
  everything.softcap = 20.0F;
  everything.sinks = true;
  std::uint64_t seed = 1;
  for (const AttentionSpec& spec :
       {make_spec(Dtype::kBf16, 4, 2, kDim, {-1, 0}), make_spec(Dtype::kF16, 4, 2, kDim, {90, 0}), everything}) {
    // With few tokens some queries see none, between others that see one.
    for (const auto& [heads, ratio] : {std::pair{1, 0.4}, {2, 0.4}, {2, 0.95}}) {
      const Evicted evicted({spec, kRagged}, ratio, heads, ++seed);
      const Job job = evicted.placed();
      ASSERT_NE(job.positions, nullptr);
      const JobResult reference = alone(job, evicted.tensors);
      expect_right(evicted, reference);
      for (const int world : {1, 2, 3}) {
        for (const Options& asked : {shaped(LayoutKind::kStriped, 0, 0), shaped(LayoutKind::kStriped, 37, 128),
                                     shaped(LayoutKind::kZigzag, 0, 256), shaped(LayoutKind::kContiguous, 0, 1024)}) {
          EXPECT_TRUE(run_gpu_job(job, asked, evicted.tensors, world).same_bits(reference))
              << describe(job) << ": " << world << " ranks, " << layout_name(asked.layout.kind) << ", stripe "
              << asked.layout.stripe << ", block " << asked.block_tokens;
        }
        for (const std::int64_t page : {16, 128}) {
          JobResult paged = poisoned_result(job, world);
          run_gpu_world(world, [&](Transport& transport) {
            run_paged_rank(job, options(world == 3 ? 128 : 0), evicted.tensors, transport, {page, page == 128, 3},
                           paged);
          });
          EXPECT_TRUE(paged.same_bits(reference)) << describe(job) << ": " << world << " ranks, pages of " << page;
        }
      }
    }
  }
}

// More tiles than a KV split holds, with windows that begin anywhere.
TEST_P(GpuEvicted, OfSeveralKvSplits) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{14000, 0}}) {
    const std::int64_t keys = 128 * 140 + 50;
    const Evicted evicted({make_spec(Dtype::kBf16, 2, 1, kDim, mask), {{170, keys, keys / 2}, {3, keys, keys - 40}}},
                          0.25, 1, 5);
    const Job job = evicted.placed();
    ASSERT_NE(job.positions, nullptr);
    const JobResult reference = alone(job, evicted.tensors);
    expect_right(evicted, reference);
    for (const int world : {2, 3}) {
      for (const std::int64_t block : {0, 1280, 128 * 64}) {
        EXPECT_TRUE(run_gpu_job(job, options(block), evicted.tensors, world).same_bits(reference))
            << world << ", " << block;
      }
    }
  }
}

TEST_P(GpuEvicted, ThatKeepEverythingAreTheJob) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{90, 40}}) {
    for (const int heads : {1, 2}) {
      const Evicted evicted({make_spec(Dtype::kBf16, 4, 2, kDim, mask), kRagged}, 0.0, heads, 3);
      const JobResult plain = alone(evicted.whole, evicted.all);
      Job kept = evicted.job;
      kept.positions = evicted.positions;
      kept.spec.positions = heads;
      for (const int world : {1, 2}) {
        EXPECT_TRUE(run_gpu_job(kept, options(), evicted.tensors, world).same_bits(plain)) << describe(kept);
      }
    }
  }
}

// Where rows don't share tiles, each has the bits of a job of its own over what it sees.
TEST_P(GpuEvicted, AreAttentionOverTheKeptTokens) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{60, 9}}) {
    const Evicted evicted({make_spec(Dtype::kBf16, 4, 2, kDim, mask), {{20, 300, 150}, {3, 40, 37}}}, 0.4, 2, 8);
    const Job job = evicted.placed();
    ASSERT_NE(job.positions, nullptr);
    const JobResult result = alone(job, evicted.tensors);
    expect_right(evicted, result);
    if (tiles_of(job.spec).query > 1) continue;
    EXPECT_TRUE(result.same_bits(
        by_definition(evicted, [&](const Job& row, const JobTensors& tensors) { return alone(row, tensors); })));
  }
}

// Behind the tokens that were taken out positions go, and the bits stay.
TEST_P(GpuEvicted, BehindTheirGapsArePlain) {
  for (const int heads : {1, 2}) {
    const Evicted evicted({make_spec(Dtype::kBf16, 4, 2, kDim, {-1, 0}), {{200, 900, 700}, {129, 700, 571}}}, 0.5,
                          heads, 7, /*recent=*/140);
    const Job whole = evicted.placed();
    ASSERT_NE(whole.positions, nullptr);
    const JobResult result = alone(whole, evicted.tensors);
    // The last 100 queries of each.
    Evicted last = evicted;
    std::vector<Sequence> sequences;
    std::vector<std::byte> q;
    std::vector<std::byte> expected;
    const std::vector<std::int64_t> cu = whole.batch.cu_q();
    constexpr std::int64_t kRow = 2 * 4 * kDim;
    for (std::size_t s = 0; s < 2; ++s) {
      const Sequence& of = evicted.job.batch.sequences[s];
      sequences.push_back({100, of.k_len, of.q_offset + of.q_len - 100});
      q.insert(q.end(), evicted.tensors.q.begin() + (cu[s + 1] - 100) * kRow,
               evicted.tensors.q.begin() + cu[s + 1] * kRow);
      expected.insert(expected.end(), result.out.begin() + (cu[s + 1] - 100) * kRow,
                      result.out.begin() + cu[s + 1] * kRow);
    }
    last.job.batch = sequences;
    last.tensors.q = q;
    const Job moved = last.placed();
    ASSERT_EQ(moved.positions, nullptr);
    for (const int world : {1, 2}) {
      EXPECT_EQ(run_gpu_job(moved, options(), last.tensors, world).out, expected) << world;
    }
  }
}

RINGATTN_FOR_EVERY_CUDA_KERNEL(GpuEvicted);

}  // namespace
}  // namespace ringattn::testing
