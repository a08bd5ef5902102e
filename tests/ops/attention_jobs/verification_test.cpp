// SPDX-License-Identifier: Apache-2.0
// What `verify` rests on: differences are found and named, rows find their way, wrong results fail.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "attention/ring/reshard.hpp"
#include "kernels/attention/oracle.hpp"
#include "ops/attention_jobs/accuracy.hpp"
#include "ops/common/difference.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn {
namespace {

using testing::JobResult;
using testing::JobTensors;

Job ragged_job(Dtype dtype) {
  Job job;
  job.spec.dtype = dtype;
  job.spec.heads = 4;
  job.spec.kv_heads = 2;
  job.spec.head_dim = 16;
  job.spec.head_dim_v = 8;
  job.spec.softmax_scale = 0.25F;
  job.batch.sequences = {{37, 37, 0}, {0, 5, 5}, {1, 1, 0}, {20, 150, 130}};
  return job;
}

TEST(UlpDistance, CountsRepresentableValues) {
  EXPECT_EQ(ulp_distance(0x3f800000, 0x3f800001, Dtype::kF32), 1);
  EXPECT_EQ(ulp_distance(0x3f80, 0x3f80, Dtype::kBf16), 0);
  EXPECT_EQ(ulp_distance(0x3f80, 0x3f7f, Dtype::kBf16), 1);
  EXPECT_EQ(ulp_distance(0x0000, 0x8000, Dtype::kF16), 1);    // +0 and −0
  EXPECT_EQ(ulp_distance(0x0001, 0x8001, Dtype::kF16), 3);    // across both zeros
  EXPECT_EQ(ulp_distance(0x7c00, 0x7bff, Dtype::kF16), 1);    // ∞ and the largest finite value
  EXPECT_EQ(ulp_distance(0x7fc0, 0x3f80, Dtype::kBf16), -1);  // NaN
}

TEST(FirstDifference, IsFoundWhereverItIs) {
  const Job job = ragged_job(Dtype::kBf16);
  const std::int64_t tokens = job.batch.q_tokens();
  std::vector<std::uint16_t> left(static_cast<std::size_t>(tokens * 4 * 8), 0x3f80);
  const auto view = [&](const std::vector<std::uint16_t>& values) {
    return dense_view(static_cast<const void*>(values.data()), Dtype::kBf16, tokens, 4, 8);
  };
  // As if a rank held its rows in two runs, in this order.
  const PackedRun runs[] = {{30, tokens}, {0, 30}};
  EXPECT_FALSE(first_difference(false, view(left), view(left), runs));
  for (std::size_t at = 0; at < left.size(); ++at) {
    std::vector<std::uint16_t> right = left;
    right[at] = 0x3f81;
    const auto found = first_difference(false, view(left), view(right), runs);
    ASSERT_TRUE(found) << at;
    const auto row = static_cast<std::int64_t>(at / 32);
    EXPECT_EQ(found->token, row < tokens - 30 ? 30 + row : row - (tokens - 30));
    EXPECT_EQ(found->head, static_cast<std::int64_t>(at / 8 % 4));
    EXPECT_EQ(found->dim, static_cast<std::int64_t>(at % 8));
    EXPECT_EQ(found->right_bits, 0x3f81U);
  }
}

TEST(FirstDifference, SeesSignsOfZeroAndNanPatterns) {
  const float left[] = {0.0F, std::numeric_limits<float>::quiet_NaN()};
  float right[] = {0.0F, std::numeric_limits<float>::quiet_NaN()};
  const PackedRun run{0, 2};
  const auto compare = [&] {
    return first_difference(true, dense_view(static_cast<const void*>(left), Dtype::kF32, 2, 1, 1),
                            dense_view(static_cast<const void*>(right), Dtype::kF32, 2, 1, 1), {&run, 1});
  };
  EXPECT_FALSE(compare());
  right[0] = -0.0F;
  EXPECT_EQ(compare()->token, 0);
  right[0] = 0.0F;
  const std::uint32_t other_nan = 0x7fc00001;
  std::memcpy(&right[1], &other_nan, sizeof other_nan);
  EXPECT_EQ(compare()->token, 1);
}

TEST(FirstDifference, IsDescribedInTheSequencesOwnTokens) {
  const Job job = ragged_job(Dtype::kBf16);
  EXPECT_EQ(describe(Difference{false, 38 + 5, 3, 7, Dtype::kBf16, 0x3f00, 0x3f01}, job),
            "out at sequence 3, token 5, head 3, dim 7: 0.5 (0x3f00) against 0.50390625 (0x3f01), 1 ulp apart");
  EXPECT_EQ(describe(Difference{true, 37, 0, 0, Dtype::kF32, 0x7fc00000, 0x3f800000}, job),
            "lse at sequence 2, token 0, head 0: nan (0x7fc00000) against 1 (0x3f800000)");
}

TEST(FirstDifference, OfAllRanksIsTheEarliest) {
  run_threads_world(3, {}, [](Transport& world) {
    const Collective collective(world, Timeouts(30.0));
    EXPECT_FALSE(earliest(collective, std::nullopt));
    std::optional<Difference> mine;
    if (world.rank() > 0) mine = Difference{false, 100 - 10 * world.rank(), 1, 2, Dtype::kF32, 1, 2};
    const auto first = earliest(collective, mine);
    ASSERT_TRUE(first);
    EXPECT_EQ(first->token, 80);
  });
}

TEST(Reshard, BringsEveryRowToItsPlace) {
  const Job job = ragged_job(Dtype::kF32);
  constexpr int kWorld = 4;
  constexpr std::int64_t kTokenBytes = 12;
  std::vector<std::byte> packed(static_cast<std::size_t>(job.batch.q_tokens() * kTokenBytes));
  for (std::size_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<std::byte>(i * 31 % 251);
  const Layout even = even_layout(job.batch.q_lengths(), kWorld);
  EXPECT_EQ(even.tokens(0) + even.tokens(1) + even.tokens(2) + even.tokens(3), job.batch.q_tokens());
  for (const int dealt : {1, 2, 4}) {
    const LayoutRequest request{LayoutKind::kStriped, 8};
    const Layout from = widened(make_layout(job, dealt, request, 1, 8).queries, job.batch, kWorld);
    run_threads_world(kWorld, {}, [&](Transport& world) {
      const int rank = world.rank();
      std::vector<std::byte> rows(static_cast<std::size_t>(from.tokens(rank) * kTokenBytes));
      std::vector<std::byte> expected(static_cast<std::size_t>(even.tokens(rank) * kTokenBytes));
      std::vector<std::byte> target(expected.size());
      from.shard(rank, packed.data(), rows.data(), kTokenBytes);
      even.shard(rank, packed.data(), expected.data(), kTokenBytes);
      reshard(world, from, even, rows.data(), target.data(), kTokenBytes, Deadline::after(30));
      EXPECT_TRUE(target == expected) << dealt << " ranks dealt, rank " << rank;
    });
  }
}

TEST(SampledRows, AreDifferentAndHoldTheFirstAndTheLast) {
  const Job job = ragged_job(Dtype::kF32);
  for (const std::int64_t count : {1, 2, 3, 64, 231, 232, 10000}) {
    const std::vector<RowSample> rows = sample_rows(job, count, 5);
    EXPECT_EQ(static_cast<std::int64_t>(rows.size()), std::min<std::int64_t>(count, job.batch.q_tokens() * 4));
    EXPECT_EQ(rows.front(), (RowSample{0, 0}));
    if (count > 1) {
      EXPECT_EQ(rows.back(), (RowSample{job.batch.q_tokens() - 1, 3}));
    }
    for (std::size_t i = 1; i < rows.size(); ++i) EXPECT_FALSE(rows[i - 1] == rows[i]);
    EXPECT_EQ(rows, sample_rows(job, count, 5));
  }
  Job empty = job;
  empty.batch.sequences = {{0, 9, 9}};
  EXPECT_TRUE(sample_rows(empty, 64, 5).empty());
}

// A job's tensors, and a result to be judged.
struct Judged {
  Job job;
  JobTensors tensors;
  JobResult result;

  Accuracy check() const {
    const AttentionSpec& spec = job.spec;
    const auto reader = [&](const std::vector<std::byte>& packed, std::int64_t heads, std::int64_t dim) {
      return [&packed, &spec, heads, dim](std::span<const PackedRun> runs, const MutableTensorView& rows) {
        const std::int64_t bytes = heads * dim * static_cast<std::int64_t>(size_of(spec.dtype));
        auto* target = static_cast<std::byte*>(rows.data);
        for (const PackedRun& run : runs) {
          const auto count = static_cast<std::size_t>(run.tokens() * bytes);
          std::memcpy(target, packed.data() + run.begin * bytes, count);
          target += count;
        }
      };
    };
    const AccuracyInputs inputs{job,
                                {16, 1},
                                spec.sinks ? tensors.sinks.data() : nullptr,
                                reader(tensors.q, spec.heads, spec.head_dim),
                                reader(tensors.k, spec.kv_heads, spec.head_dim),
                                reader(tensors.v, spec.kv_heads, spec.head_dim_v)};
    const std::vector<RowSample> rows = sample_rows(job, 1 << 20, 1);
    const PackedRun whole{0, job.batch.q_tokens()};
    return check_rows(inputs, rows, {&whole, 1},
                      dense_view(static_cast<const void*>(result.out.data()), spec.dtype, job.batch.q_tokens(),
                                 spec.heads, spec.head_dim_v),
                      {const_cast<float*>(result.lse.data()), spec.heads, 1});
  }
};

Judged judged(Dtype dtype, bool sinks) {
  Judged judged;
  judged.job = ragged_job(dtype);
  judged.job.spec.sinks = sinks;
  judged.tensors = testing::random_tensors(judged.job, 11);
  judged.result = testing::run_job(judged.job, {}, judged.tensors, 1);
  return judged;
}

TEST(AccuracyCheck, PassesWhatTheKernelComputes) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const bool sinks : {false, true}) {
      const Accuracy accuracy = judged(dtype, sinks).check();
      EXPECT_TRUE(accuracy.passes()) << dtype_name(dtype) << ": " << accuracy.error << " of " << accuracy.allowed()
                                     << ", lse " << accuracy.lse_error << ", misplaced " << accuracy.misplaced;
      EXPECT_EQ(accuracy.rows, 58 * 4);
    }
  }
}

TEST(AccuracyCheck, FailsOneWrongElement) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
    Judged wrong = judged(dtype, false);
    std::byte* element = wrong.result.out.data() + (41 * 4 + 2) * 8 * size_of(dtype);
    store_element(element, dtype, load_element(element, dtype) + 0.5F);
    const Accuracy accuracy = wrong.check();
    EXPECT_FALSE(accuracy.passes());
    EXPECT_EQ(accuracy.worst, (RowSample{41, 2}));
  }
}

TEST(AccuracyCheck, FailsOneWrongLse) {
  Judged wrong = judged(Dtype::kBf16, false);
  wrong.result.lse[17 * 4 + 1] += 0.01F;
  const Accuracy accuracy = wrong.check();
  EXPECT_FALSE(accuracy.passes());
  EXPECT_EQ(accuracy.worst_lse, (RowSample{17, 1}));
}

TEST(AccuracyCheck, FailsNanWhereThereIsNone) {
  Judged wrong = judged(Dtype::kF32, false);
  store_element(wrong.result.out.data(), Dtype::kF32, std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(wrong.check().misplaced, 1);
  EXPECT_FALSE(wrong.check().passes());
  EXPECT_EQ(wrong.check().compared, 58 * 4 * 8 - 1);
  for (std::size_t at = 0; at < wrong.result.out.size(); at += 4) {
    store_element(wrong.result.out.data() + at, Dtype::kF32, std::numeric_limits<float>::quiet_NaN());
  }
  EXPECT_EQ(wrong.check().compared, 0);
}

TEST(AccuracyCheck, AllowsNanThatATileSpreads) {
  Judged spread = judged(Dtype::kF32, false);
  // A NaN in V at key 40 of the last sequence: queries stand at 130 and later, and all see it.
  const std::int64_t token = 37 + 5 + 1 + 40;
  store_element(spread.tensors.v.data() + token * 2 * 8 * 4, Dtype::kF32, std::numeric_limits<float>::quiet_NaN());
  spread.result = testing::run_job(spread.job, {}, spread.tensors, 2);
  EXPECT_TRUE(spread.check().passes());
  // A result that hides it is wrong.
  for (float& lse : spread.result.lse) lse += 0.0F;
  for (std::size_t at = 0; at < spread.result.out.size(); at += 4) {
    if (load_element(spread.result.out.data() + at, Dtype::kF32) !=
        load_element(spread.result.out.data() + at, Dtype::kF32)) {
      store_element(spread.result.out.data() + at, Dtype::kF32, 0.0F);
    }
  }
  EXPECT_GT(spread.check().misplaced, 0);
}

TEST(AccuracyCheck, IsCombinedOverRanks) {
  run_threads_world(3, {}, [](Transport& world) {
    Accuracy mine;
    mine.rows = 2;
    mine.error = world.rank() == 1 ? 0.5 : 0.1;
    mine.worst = {world.rank(), 0};
    mine.same_precision_error = 0.3;
    mine.misplaced = world.rank() == 2 ? 1 : 0;
    mine.first_misplaced = {7, 1};
    const Accuracy all = combine(Collective(world, Timeouts(30.0)), mine);
    EXPECT_EQ(all.rows, 6);
    EXPECT_EQ(all.error, 0.5);
    EXPECT_EQ(all.worst, (RowSample{1, 0}));
    EXPECT_EQ(all.misplaced, 1);
    EXPECT_EQ(all.first_misplaced, (RowSample{7, 1}));
    EXPECT_FALSE(all.passes());
  });
}

}  // namespace
}  // namespace ringattn
