// SPDX-License-Identifier: Apache-2.0
// KV splits give partials of their own. Whichever task computes a split, from whichever copy of its keys, in whichever
// order, a row's bits are those of one task that computes all splits. By memcmp of O, LSE and the state, and against
// the oracle.
#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <span>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

constexpr Dims kSmall[] = {{Dtype::kF32, 16, 24}, {Dtype::kBf16, 64, 64}, {Dtype::kF16, 64, 64}};

// All dims of a kernel that is compiled for some; of one that takes any, small ones.
std::vector<Dims> dims_of(const AttentionRow& row) {
  const auto can = [&](const Dims& dims) { return cannot_run(row, make_spec(dims, 4, 2, {-1, 0})).empty(); };
  if (!can(kSmall[0])) return all_dims(row);
  std::vector<Dims> small(std::begin(kSmall), std::end(kSmall));
  std::erase_if(small, [&](const Dims& dims) { return !can(dims); });
  return small;
}

class AttentionKvSplits : public KernelRowTest {
 protected:
  // Calls check(spec, keys of a KV split) for these dims, with two query heads a KV head.
  template <typename Check>
  void for_dims(const Mask& mask, Check check) {
    for (const Dims& dims : dims_of(row())) {
      const AttentionSpec spec = make_spec(dims, 4, 2, mask);
      check(spec, std::int64_t{kTilesPerKvSplit} * AttentionRunner(row(), spec).kernel().key_tile());
    }
  }

  // Whole, in tasks, and split by split.
  void expect_same_apart(const AttentionInputs& inputs, double slack = 0.0) {
    SCOPED_TRACE(describe(inputs.spec));
    AttentionRunner runner(row(), inputs.spec);
    const AttentionResult whole = runner.run(inputs, {.export_state = true});
    const TileSizes sizes{runner.kernel().query_tile(), runner.kernel().key_tile()};
    EXPECT_EQ(check_accuracy(inputs, whole.out, whole.lse, sizes, slack), "");
    // A task's end and a KV split's are the same or not.
    for (const std::int64_t tiles : {std::int64_t{kTilesPerKvSplit}, std::int64_t{kTilesPerKvSplit} + 9}) {
      EXPECT_TRUE(runner.run(inputs, {.tiles_per_task = tiles, .export_state = true}).same_bits(whole)) << tiles;
    }
    for (const Arrangement& arrangement : {Arrangement{.export_state = true, .apart = 101},
                                           {.tiles_per_task = 23, .export_state = true, .apart = 202},
                                           {.tiles_per_task = 64, .export_state = true, .apart = 303},
                                           {.run_rows = 2, .shuffle = 5, .export_state = true, .apart = 404}}) {
      EXPECT_TRUE(runner.run(inputs, arrangement).same_bits(whole))
          << "apart " << arrangement.apart << ", tiles per task " << arrangement.tiles_per_task;
    }
  }

  // Adds levels[g] to every score of KV split g, of two query rows at the end of all splits.
  static AttentionInputs with_levels(AttentionSpec spec, std::int64_t group, std::initializer_list<float> levels) {
    const std::int64_t keys = group * static_cast<std::int64_t>(levels.size()) - 3;
    AttentionInputs inputs = random_inputs(spec, {{2, keys, keys - 2}}, 92);
    for (std::int64_t token = 0; token < 2; ++token) {
      for (int head = 0; head < spec.heads; ++head) inputs.set_q(token, head, 0, 1.0F / spec.softmax_scale);
    }
    for (std::int64_t key = 0; key < keys; ++key) {
      for (int head = 0; head < spec.kv_heads; ++head) {
        inputs.set_k(key, head, 0, levels.begin()[static_cast<std::size_t>(key / group)]);
      }
    }
    return inputs;
  }
};

// Sequences that end around the edges of KV splits, in one batch: some have no key of a split that others have.
TEST_P(AttentionKvSplits, AroundTheirEdges) {
  for_dims({-1, 0}, [&](AttentionSpec spec, std::int64_t group) {
    spec.sinks = spec.dtype == Dtype::kBf16;
    spec.softcap = spec.dtype == Dtype::kF16 ? 20.0F : 0.0F;
    const std::int64_t longest = 5 * group / 2;
    expect_same_apart(random_inputs(spec,
                                    {{2, group - 1, group - 3},
                                     {3, group, group - 3},
                                     {4, group + 1, group - 2},  // rows on both sides of the edge
                                     {2, longest, longest - 2},
                                     {2, 40, 38}},
                                    91));
  });
}

TEST_P(AttentionKvSplits, EveryKeySeen) {
  for_dims({-1, -1}, [&](const AttentionSpec& spec, std::int64_t group) {
    expect_same_apart(random_inputs(spec, {{3, 2 * group + 70, 0}}, 93));
  });
}

// The window leaves out the first KV split, and begins inside of the next one.
TEST_P(AttentionKvSplits, InAWindow) {
  for_dims({}, [&](AttentionSpec spec, std::int64_t group) {
    spec.mask = {group + group / 3, 0};
    spec.sinks = true;
    const std::int64_t keys = 5 * group / 2;
    expect_same_apart(random_inputs(spec, {{2, keys, keys - 2}, {3, keys, group - 2}}, 94));
  });
}

// The softmax_offset stays where a KV split's is larger by less than the threshold, and moves where it is larger by
// more.
TEST_P(AttentionKvSplits, ThatLieApart) {
  CaseChoice cases = choose_cases(3);
  for_dims({-1, 0}, [&](const AttentionSpec& spec, std::int64_t group) {
    for (const std::initializer_list<float> levels :
         {std::initializer_list<float>{0.0F, 6.0F, 3.0F}, {0.0F, 30.0F, 5.0F}, {40.0F, 0.0F}, {0.0F, 200.0F, 400.0F}}) {
      if (!cases.take()) continue;
      SCOPED_TRACE(fmt::format("{} and then {}", levels.begin()[0], levels.begin()[1]));
      expect_same_apart(with_levels(spec, group, levels));
    }
  });
}

// Scores of −∞ in all of the first KV splits, or of one between others.
TEST_P(AttentionKvSplits, WithoutAFiniteScore) {
  CaseChoice cases = choose_cases(2);
  for_dims({-1, 0}, [&](const AttentionSpec& spec, std::int64_t group) {
    for (const std::initializer_list<float> levels :
         {std::initializer_list<float>{-kInfinity, 0.0F}, {0.0F, -kInfinity, 1.0F}, {-kInfinity, -kInfinity}}) {
      if (cases.take()) expect_same_apart(with_levels(spec, group, levels));
    }
  });
}

TEST_P(AttentionKvSplits, WithNanInOneOfThem) {
  CaseChoice cases = choose_cases(2);
  for_dims({-1, 0}, [&](const AttentionSpec& spec, std::int64_t group) {
    for (const std::int64_t key : {std::int64_t{5}, group + 1000, 2 * group}) {
      if (!cases.take()) continue;
      AttentionInputs inputs = random_inputs(spec, {{2, 2 * group + 50, 2 * group + 48}}, 95);
      inputs.set_v(key, 0, 3, kNan);
      inputs.set_k(key, 1, 7, kNan);
      expect_same_apart(inputs);
    }
  });
}

// ∞ keeps its place, however small its KV split's weight. With tensor cores the weight may be 0, and 0 · ∞ is NaN.
TEST_P(AttentionKvSplits, WithInfinityInALightOne) {
  for_dims({-1, 0}, [&](const AttentionSpec& spec, std::int64_t group) {
    AttentionInputs first = with_levels(spec, group, {0.0F, 300.0F});
    first.set_v(17, 0, 2, kInfinity);
    expect_same_apart(first);
    AttentionInputs last = with_levels(spec, group, {300.0F, 0.0F});
    last.set_v(group + 17, 0, 2, -kInfinity);
    expect_same_apart(last);
  });
}

TEST_P(AttentionKvSplits, OfHugeLogits) {
  for_dims({-1, 0}, [&](const AttentionSpec& spec, std::int64_t group) {
    AttentionInputs inputs = random_inputs(spec, {{3, 2 * group + 300, 2 * group + 297}}, 96);
    for (std::size_t at = 0; at < inputs.q.size(); at += size_of(spec.dtype)) {
      store_element(inputs.q.data() + at, spec.dtype, 3000.0F * load_element(inputs.q.data() + at, spec.dtype));
    }
    expect_same_apart(inputs, slack_of_towering_scores(spec.dtype));
  });
}

RINGATTN_FOR_EVERY_KERNEL(AttentionKvSplits);

}  // namespace
}  // namespace ringattn::testing
