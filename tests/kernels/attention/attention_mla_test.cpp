// SPDX-License-Identifier: Apache-2.0
// Keys whose first columns are the values, as the rows [c, k_r] of latents are (latent.hpp): views into the keys and
// copies of the values give the same bits, wherever the keys lie.
#include <vector>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"

namespace ringattn::testing {
namespace {

class AttentionMla : public KernelRowTest {};

TEST_P(AttentionMla, ValuesThatLieInTheKeysHaveTheBitsOfACopy) {
  for (const Dims& dims : varied_dims(row())) {
    if (dims.head_dim_v > dims.head_dim) continue;
    for (const int kv_heads : {1, 2}) {
      const AttentionSpec spec = make_spec(dims, 6, kv_heads, {-1, 0});
      const AttentionInputs inputs = with_values_in_keys(random_inputs(spec, {{40, 430, 390}, {5, 129, 124}}, 17));
      AttentionRunner runner(row(), spec, 2);
      const AttentionResult copied = runner.run(inputs);
      ASSERT_EQ(
          check_accuracy(inputs, copied.out, copied.lse, {runner.kernel().query_tile(), runner.kernel().key_tile()}),
          "")
          << describe(spec);
      for (const Arrangement& arrangement :
           {Arrangement{.values_in_keys = true},
            {.tiles_per_task = 1, .run_rows = 11, .shuffle = 18, .strided = true, .values_in_keys = true},
            {.shuffle = 19, .odd_keys = true, .values_in_keys = true},
            {.values_in_keys = true, .pages = {.page_size = 64, .gap = 16}}}) {
        EXPECT_TRUE(runner.run(inputs, arrangement).same_bits(copied)) << describe(spec);
      }
    }
  }
}

// All 128 heads of a model over one KV head: more rows of a token than a row group of the CPU's kernel has.
TEST_P(AttentionMla, AllHeadsOfAModel) {
  const AttentionSpec spec = make_spec(Dims{Dtype::kBf16, 576, 512}, 128, 1, {-1, 0});
  if (!cannot_run(row(), spec).empty()) GTEST_SKIP() << cannot_run(row(), spec);
  const AttentionInputs inputs = with_values_in_keys(random_inputs(spec, {{3, 200, 197}}, 20));
  const AttentionResult result = attend_with(row(), inputs, {.values_in_keys = true});
  EXPECT_EQ(check_accuracy(inputs, result.out, result.lse), "");
  EXPECT_TRUE(attend_with(row(), inputs, {.threads = 3, .tiles_per_task = 1, .run_rows = 1}).same_bits(result));
}

RINGATTN_FOR_EVERY_KERNEL(AttentionMla);

}  // namespace
}  // namespace ringattn::testing
