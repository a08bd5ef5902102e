// SPDX-License-Identifier: Apache-2.0
// Lists of the best blocks of a job whose rows are dealt to ranks: those of one that has all rows, to the bit, however
// tokens are dealt in whole blocks; and what is refused.
#include <gtest/gtest.h>

#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "comm/self.hpp"
#include "ops/attention/top_k_block_mask.hpp"
#include "tests/support/dealt_block_masks.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

TEST(BestBlocks, AreThoseOfOneRankHoweverTokensAreDealt) {
  const std::vector<Sequence> ragged = {{300, 1300, 1000}, {0, 9, 0},       {257, 90, 11}, {64, 0, 0},
                                        {2000, 2000, 0},   {700, 900, 200}, {17, 40, -9}};
  std::uint32_t seed = 0;
  for (const auto& [heads, mask] : {std::pair{1, Mask{-1, 0}}, {2, Mask{-1, -1}}, {4, Mask{300, 0}}}) {
    const Job job{make_spec(heads == 2 ? Dtype::kF32 : Dtype::kBf16, 4, 2, 40, mask), ragged};
    const BlockMaskShape shape{32, 128, heads};
    const JobTensors tensors = random_tensors(job, 4);
    const BlockMask expected = block_mask_of_all(job, shape, 5, tensors);
    for (int world = 1; world <= 5; ++world) {
      const Dealt dealt = deal(job, shape, world, ++seed);
      std::mutex mutex;
      const auto check = [&](Transport& transport) {
        const auto block_mask = block_mask_of_rank(job, shape, 5, dealt, tensors, transport);
        const std::lock_guard lock(mutex);
        ASSERT_EQ(block_mask->indices().size(), expected.indices().size());
        EXPECT_EQ(std::memcmp(block_mask->indices().data(), expected.indices().data(), expected.indices().size_bytes()),
                  0)
            << describe(job) << ", rank " << transport.rank() << " of " << world;
        EXPECT_TRUE(*block_mask == expected);
      };
      if (world == 1) {
        check(*make_self_transport());
      } else {
        run_threads_world(world, {}, check);
      }
    }
  }
}

TEST(BestBlocks, WithMoreRanksThanBlocks) {
  const Job job{make_spec(Dtype::kF16, 2, 1, 8, {-1, 0}), {{1, 1, 0}}};
  const BlockMaskShape shape{128, 128, 1};
  const JobTensors tensors = random_tensors(job, 4);
  const Dealt dealt = deal(job, shape, 4, 3);
  run_threads_world(4, {}, [&](Transport& transport) {
    EXPECT_TRUE(*block_mask_of_rank(job, shape, 3, dealt, tensors, transport) ==
                block_mask_of_all(job, shape, 3, tensors));
  });
}

TEST(BestBlocks, RefuseWhatDoesNotFit) {
  const Job job{make_spec(Dtype::kBf16, 4, 2, 16, {-1, 0}), {{300, 300, 0}}};
  const BlockMaskShape shape{32, 128, 2};
  const JobTensors tensors = random_tensors(job, 4);
  const Dealt whole = deal(job, shape, 1, 1);
  const auto refused = [&](const Job& of, const BlockMaskShape& block_mask, int count, const Dealt& dealt) {
    const auto self = make_self_transport();
    return error_of([&] { block_mask_of_rank(of, block_mask, count, dealt, tensors, *self); });
  };
  EXPECT_EQ(refused(job, shape, 0, whole).code(), ErrorCode::kUsage);
  EXPECT_EQ(refused(job, {32, 128, 3}, 2, whole).code(), ErrorCode::kUsage);
  Job listed = job;
  set_block_mask(listed, std::make_shared<const BlockMask>(block_mask_of_all(job, shape, 2, tensors)));
  EXPECT_EQ(refused(listed, shape, 2, whole).code(), ErrorCode::kUsage);
  // Layouts of other ranks, and rows of other layouts.
  EXPECT_NE(std::string(refused(job, shape, 2, deal(job, shape, 2, 1)).what()).find("over 2 ranks"), std::string::npos);
  const auto self = make_self_transport();
  Options options;
  options.kernel.backend = "cpu";
  const auto with_rows = [&](const TensorView& q, const TensorView& k) {
    return error_of([&] { top_k_block_mask(job, shape, 2, {whole.queries, whole.keys, q, k}, *self, options); });
  };
  const TensorView q = view_of(tensors.q, job.spec, 4);
  const TensorView k = view_of(tensors.k, job.spec, 2);
  EXPECT_EQ(with_rows(q, q).code(), ErrorCode::kUsage);
  TensorView few = q;
  few.tokens = 299;
  EXPECT_EQ(with_rows(few, k).code(), ErrorCode::kUsage);
  // A block that two ranks share, and ranks that want other masks.
  const std::vector<std::int64_t> lengths{300};
  const Dealt cut{Layout(lengths, Runs{{{0, 0, 160}}, {{0, 160, 300}}}),
                  Layout(lengths, Runs{{{0, 0, 168}}, {{0, 168, 300}}})};
  const Error shared = error_of([&] {
    run_threads_world(2, {}, [&](Transport& transport) { block_mask_of_rank(job, shape, 2, cut, tensors, transport); });
  });
  EXPECT_EQ(shared.code(), ErrorCode::kUsage);
  EXPECT_NE(std::string(shared.what()).find("block 1 of the keys of sequence 0 lies on ranks 0 and 1"),
            std::string::npos)
      << shared.what();
  const Dealt dealt = deal(job, shape, 2, 1);
  const Error unlike = error_of([&] {
    run_threads_world(2, {}, [&](Transport& transport) {
      block_mask_of_rank(job, shape, 2 + transport.rank(), dealt, tensors, transport);
    });
  });
  EXPECT_EQ(unlike.code(), ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace ringattn::testing
